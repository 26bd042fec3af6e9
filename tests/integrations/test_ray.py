"""Ray Train on a local cluster: sharded workers, Ray's checkpoints, and a worker that fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from integrations.launching import EXAMPLES, needs, python, succeed

pytestmark = [needs("ray", "pandas", "pyarrow"), pytest.mark.timeout(400)]

# No killing of workers because of what other processes of the machine hold.
RAY = {"RAY_memory_monitor_refresh_ms": "0", "RAY_USAGE_STATS_ENABLED": "0"}


def losses(storage: Path, *arguments: object) -> tuple[str, Path]:
    done = python(EXAMPLES / "ray_train.py", "--storage", storage, *arguments, env=RAY)
    printed = succeed(done)
    step, loss = re.search(r"step (\d+)  loss ([\d.]+)", printed).groups()  # pyright: ignore
    assert step == "6"
    return loss, Path(re.search(r"checkpoint (.+)", printed)[1])  # pyright: ignore


def test_workers_that_are_started_again_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    loss, checkpoint = losses(tmp_path / "whole")
    assert (checkpoint / "manifest.json").exists()
    again, _ = losses(tmp_path / "failed", "--fail-at", 5)
    assert (tmp_path / "failed" / "failed").exists()
    assert again == loss
