"""Asking and insisting."""

import signal

import pytest

from shoal.train import launch
from shoal.train.launch import stop_signals


def test_an_echo_does_not_insist_but_a_later_signal_does(monkeypatch):
    calls = []
    now = 100.0
    monkeypatch.setattr(launch.time, "monotonic", lambda: now)
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals(
        [signal.SIGINT, signal.SIGTERM],
        ask=lambda: calls.append("ask"),
        insist=lambda number: calls.append(number.name),
    ):
        signal.raise_signal(signal.SIGINT)
        now += 1.9
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert calls == ["ask"]
        now += 0.2
        signal.raise_signal(signal.SIGTERM)
        assert calls == ["ask", "SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
