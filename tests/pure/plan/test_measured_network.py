"""A network that was measured: the line through its points, and the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.comm.network import Network
from shoal.errors import UsageError
from shoal.plan.measured_network import fitted, read_network, store_network


def test_a_line_is_found_again() -> None:
    points = [(sent, 40.0 + sent / 25e3) for sent in (4e3, 1e6, 2e8)]
    found = fitted("wire", points)
    assert found.bandwidth_gb_per_s == pytest.approx(25)
    assert found.latency_us == pytest.approx(40)
    with pytest.raises(UsageError, match="no bandwidth to tell"):
        fitted("wire", [(sent, 40.0) for sent, _ in points])


def test_it_is_kept(tmp_path: Path) -> None:
    path, wire = tmp_path / "new" / "network.json", Network("wire", 12.5, 3.0)
    with pytest.raises(UsageError, match="no network was measured yet"):
        read_network(path)
    store_network(path, wire)
    assert read_network(path) == wire
    path.write_text('{"name": "wire"}')
    with pytest.raises(UsageError, match="measure it again"):
        read_network(path)


def test_one_process_has_no_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--measure-network"]) == 2
    assert "torchrun" in capsys.readouterr().err
