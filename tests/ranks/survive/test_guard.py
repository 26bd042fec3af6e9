"""Under torchrun a guard stands in for each rank, so that torchrun hears nothing of a death."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from survival import program
from survival.jobs import outcome_in
from survival.truth import assert_bit_equal
from train_command import SOURCE

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def torchrun(folder: Path, num_ranks: int, plan: dict, *flags: str) -> subprocess.CompletedProcess:
    folder.mkdir(parents=True)
    words = [*TORCHRUN, *flags, "--nproc-per-node", str(num_ranks), "-m", "shoal.survive"]
    return subprocess.run(
        [*words, str(program.__file__), str(folder), json.dumps(plan)],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_torchrun_ends_well_though_rank_0_was_killed(tmp_path):
    plan = {"steps": 6, "0": [[3, "reduction"]]}
    done = torchrun(tmp_path / "job", 3, plan)
    assert done.returncode == 0, done.stderr
    assert "rank 0 died of signal 9; the others go on" in done.stderr
    outcome = outcome_in(tmp_path / "job", lost=[0])
    assert outcome.stories.keys() == {1, 2}
    assert_bit_equal(outcome, tmp_path, 3, plan)


@pytest.mark.soak
def test_torchrun_starts_again_when_too_many_died(tmp_path):
    """Two of four: the guards fail, and torchrun starts all again, from the checkpoint."""
    plan = {"steps": 5, "save_at": 2, "1": [[3, "reduction"]], "2": [[3, "deciding"]]}
    done = torchrun(tmp_path / "job", 4, plan, "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    assert "more ranks died than can be rebuilt" in done.stderr
    outcome = outcome_in(tmp_path / "job", lost=[])
    assert all(min(map(int, story["losses"])) == 2 for story in outcome.stories.values())
    assert all(torch.isfinite(value).all() for value in outcome.state.values())


@pytest.mark.soak
def test_an_error_ends_the_job_as_everywhere(tmp_path):
    done = torchrun(tmp_path / "job", 2, {"steps": 2, "optimizer": "adamw", "layout": "none"})
    assert done.returncode == 1
    assert "KeyError: 'none'" in done.stderr


def test_misuse_of_the_command_is_said():
    words = [sys.executable, "-m", "shoal.survive", "program.py"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--ranks: how many processes to start" in done.stderr
