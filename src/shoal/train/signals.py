"""Asking a run to stop, and insisting on it.

The first Ctrl-C asks: the step in progress ends, a checkpoint is written. Shells, `make`,
`timeout` and launchers all pass signals on, so the same Ctrl-C can arrive several times; only
one that comes clearly later insists.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What asks a run to stop: Ctrl-C, a scheduler or `kill`, a terminal that was closed."""

ECHO_S = 2.0
"""Within this time a further signal is an echo of the first."""


@contextmanager
def stop_signals(
    signals: Sequence[signal.Signals],
    *,
    ask: Callable[[], None],
    insist: Callable[[signal.Signals], None],
) -> Iterator[None]:
    """Call `ask` on the first of `signals`, `insist` on one that comes clearly later."""
    asked_at: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        if asked_at is None:
            asked_at = time.monotonic()
            ask()
        elif time.monotonic() - asked_at > ECHO_S:
            insist(signal.Signals(number))

    previous = {
        number: signal.signal(number, handle)
        for number in signals
        # `nohup` ignores SIGHUP on behalf of a run that shall outlive its terminal.
        if not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def die_of(number: signal.Signals) -> NoReturn:
    """End this process as if it had never handled the signal."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    raise AssertionError(f"{number.name} did not end the process")
