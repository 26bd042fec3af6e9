"""kill -9 of a rank in the middle of a save leaves the last published checkpoint whole."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("killing.py")
SOURCE = Path(__file__).parents[3] / "src"


def kill(folder: Path, count: int, seed: int, timeout_s: float) -> tuple[int, int, int]:
    """Return the number of ranks killed, of stages, and of second checkpoints published."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), str(count), str(seed)],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    found = re.search(r"(\d+) kills of \d+ in (\d+) stages, (\d+) published", done.stdout)
    assert found, done.stdout + done.stderr
    return int(found[1]), int(found[2]), int(found[3])


def test_twenty_kills(tmp_path: Path) -> None:
    kills, num_stages, published = kill(tmp_path, 20, seed=3, timeout_s=110)
    assert kills == 20
    assert num_stages > 40
    assert published < 20


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_five_hundred_kills_at_every_stage(tmp_path: Path) -> None:
    kills, num_stages, published = kill(tmp_path, 500, seed=4, timeout_s=1700)
    assert kills == 500
    assert num_stages < 500
    assert 0 < published < 500
