"""A loop of one's own under torchrun: who left the others is said by itself."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.watch import post_mortem

SCRIPT = Path(__file__).with_name("own_loop.py")
SOURCE = Path(__file__).parents[3] / "src"
LIMIT_S = 60
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "SHOAL_DEBUG"}
"""Its ranks differ on purpose, which debugging would name first."""


def run(folder: Path, manner: str, num_ranks: int) -> tuple[str, float]:
    began_at = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(num_ranks), str(SCRIPT), str(folder), manner),
        ],
        env={**ENVIRONMENT, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
    )
    assert done.returncode != 0
    return done.stdout, time.monotonic() - began_at


@pytest.mark.timeout(180)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("manner", "expected"),
    [
        ("skipped", "of group 0 was the gather of unit"),
        ("order", "rank 1 launched the gather of unit"),
        ("forward-only", "of group 0 was the gather of unit"),
    ],
)
def test_who_left_is_told_without_being_asked(tmp_path, manner, expected, num_ranks):
    output, took_s = run(tmp_path, manner, num_ranks)
    assert expected in output
    assert "its collective " in output
    assert took_s < LIMIT_S, "before the watchdog's limit"
    assert post_mortem(str(tmp_path)) in output
