"""`shoal train --survive`: ranks are killed, rank 0 too, and the others go on in place."""

import itertools
import json
import os
import signal
from pathlib import Path

import pytest
import torch

from harness import on_ranks
from ranks.train.test_loop import make_world
from shoal.checkpoint import latest, load, read_manifest, step_folder
from shoal.errors import UsageError
from shoal.train.config import (
    DataConfig,
    FaultConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from shoal.train.job import TrainJob, new_job, resumed_job
from shoal.train.loop import train
from train_command import TINY, alive, steps_in, wait_for_steps, wait_until

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="finds the ranks of a command in /proc"
)
STEPS = 150
FLAGS = [*TINY, "--batch-size", "12", "--survive", "--steps", str(STEPS), "--save-every", "20"]


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Weights and state of the optimizer; generators belong to ranks."""
    entries = read_manifest(checkpoint).tensors
    found = {
        name: torch.empty(entry.shape, dtype=entry.dtype)
        for name, entry in entries.items()
        if not name.startswith("random/")
    }
    load(checkpoint, found, exclude=["random/*"])
    return found


def plain_job(folder: Path) -> TrainJob:
    """The job of the command, without survive."""
    config = TrainConfig(
        model=ModelConfig(dim=16, layers=1, heads=2, context=16),
        data=DataConfig(max_bytes=50_000),
        parallel=ParallelConfig(device="cpu"),
        run=RunConfig(
            steps=STEPS,
            batch_size=12,
            validate_every=0,
            save_every=0,
            sample_tokens=0,
            out=folder,
            name="resized",
        ),
    )
    job = new_job(config, overwrite=False)
    job.create(num_ranks=3)
    return job


def run_until(job: TrainJob, last: int) -> bool:
    steps = itertools.count(1)
    return train(job, make_world(), lambda: next(steps) == last)


def resized_at(folder: Path, step: int) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """The losses and the end of a run on three ranks that goes on on two."""
    job = plain_job(folder)
    on_ranks(3, run_until, job, step)
    job = resumed_job(job.folder.path, {}, more_steps=None)
    job.create(num_ranks=2)
    assert on_ranks(2, run_until, job, 0) == [True, True]
    losses = {
        line["step"]: line["loss"] for line in lines_of(job.folder.path) if line["kind"] == "step"
    }
    return losses, tensors_of(step_folder(job.folder.checkpoints, STEPS))


@pytest.mark.timeout(180)
def test_without_rank_0_the_others_go_on_as_if_the_run_was_resized(start, tmp_path):
    run = tmp_path / "runs" / "mine"
    command = start(*FLAGS, "--ranks", "3", "--name", "mine")
    wait_for_steps(run, 30)
    os.kill(command.ranks()[0], signal.SIGKILL)
    status, out, err = command.finish(120)
    assert (status, err) == (0, ""), (out, err)
    assert "rank 0" in out
    assert "died with SIGKILL; the other 2 go on" in out
    assert f"step {STEPS} of {STEPS}" in out  # said by the rank that leads now
    assert steps_in(run) == list(range(1, STEPS + 1))
    (recovery,) = [line for line in lines_of(run) if line["kind"] == "resume"]
    assert recovery["num_ranks"] == 2
    losses, truth = resized_at(tmp_path / "truth", recovery["step"])
    assert {line["step"]: line["loss"] for line in lines_of(run) if "loss" in line} == losses
    last = latest(run / "checkpoints")
    assert last is not None
    assert last.name == f"step-{STEPS:08d}"
    found = tensors_of(last)
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[name], value) for name, value in truth.items())
    assert (run / "report.html").exists()
    assert (run / "sample.txt").exists()


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_a_rank_that_stands_still_is_ended_and_the_others_go_on(start, tmp_path):
    run = tmp_path / "runs" / "mine"
    flags = ("--ranks", "3", "--name", "mine", "--stall-limit", "2")
    command = start(*FLAGS, *flags)
    wait_for_steps(run, 10)
    victim = command.ranks()[1]
    os.kill(victim, signal.SIGSTOP)
    wait_until(lambda: not alive(victim))
    status, out, err = command.finish(120)
    assert (status, err) == (0, ""), (out, err)
    assert steps_in(run) == list(range(1, STEPS + 1))


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("restarts", [0, 1])
def test_too_many_deaths_are_told_or_the_run_starts_again(restarts, start, tmp_path):
    run = tmp_path / "runs" / "mine"
    flags = ("--ranks", "4", "--name", "mine", "--max-restarts", str(restarts))
    command = start(*FLAGS, *flags)
    wait_for_steps(run, 30)
    for pid in command.ranks()[1:3]:
        os.kill(pid, signal.SIGKILL)
    status, out, err = command.finish(200)
    if restarts:
        assert status == 0, (out, err)
        assert "starting all ranks again" in out
        assert steps_in(run) == list(range(1, STEPS + 1))
    else:
        assert status == 1, (out, err)
        assert "too many at the same time" in err
        assert "--resume" in err


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(10))
def test_killed_at_any_moment(seed, start, tmp_path):
    """Two of four, one after the other: each step is there once, and the end is whole."""
    import random
    import time

    draw = random.Random(seed)
    run = tmp_path / "runs" / "mine"
    command = start(*FLAGS, "--ranks", "4", "--name", "mine", "--validate-every", "7")
    for num_steps in (20, 70):
        wait_for_steps(run, num_steps)
        time.sleep(draw.uniform(0, 0.3))
        os.kill(draw.choice(command.ranks()), signal.SIGKILL)
    status, out, err = command.finish(200)
    assert (status, err) == (0, ""), (out, err)
    assert steps_in(run) == list(range(1, STEPS + 1))
    assert tensors_of(step_folder(run / "checkpoints", STEPS))
    assert not [path.name for path in (run / "checkpoints").iterdir() if "saving" in path.name]


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"replicas": 2}, "--survive needs --replicas 1; got --replicas 2"),
        ({"compile": "graph"}, "--survive needs --compile off; got --compile graph"),
        ({"engine": "fsdp1-style"}, "--survive needs --engine fully_shard; got"),
    ],
)
def test_what_cannot_be_survived_is_said_before(parallel, message):
    with pytest.raises(UsageError, match=message):
        TrainConfig(faults=FaultConfig(survive=True), parallel=ParallelConfig(**parallel))
    with pytest.raises(UsageError, match="2 ranks or more"):
        TrainConfig(faults=FaultConfig(survive=True)).check_ranks(1)
