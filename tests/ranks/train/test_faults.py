"""Faults that the loop itself meets: saves that fail, replicas that part, errors in a unit."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness import on_ranks
from shoal.checkpoint import read_manifest
from shoal.errors import CheckpointError, RankError
from shoal.train import checkpoints
from shoal.train.config import (
    DataConfig,
    FaultConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from shoal.train.environment import Place
from shoal.train.job import TrainJob, new_job, resumed_job
from shoal.train.loop import train
from shoal.train.step import training_step
from shoal.train.world import World, make_mesh


def make_job(folder: Path, *, replicas: int = 1, engine="fully_shard", **run) -> TrainJob:
    config = TrainConfig(
        model=ModelConfig(dim=8, layers=1, heads=2, context=8),
        data=DataConfig(max_bytes=5_000),
        parallel=ParallelConfig(device="cpu", nproc=2, replicas=replicas, engine=engine),
        run=RunConfig(
            batch_size=4, out=folder, validate_every=0, sample_tokens=0, **{"name": "run", **run}
        ),
        faults=FaultConfig(check_replicas_every=1),
    )
    job = new_job(config, overwrite=False)
    job.create(num_ranks=2)
    return job


def run_job(job: TrainJob) -> bool:
    rank, size = dist.get_rank(), dist.get_world_size()
    place = Place(rank=rank, world_size=size, local_rank=rank, local_world_size=size)
    mesh = make_mesh("cpu", size, job.config.parallel.replicas)
    world = World(place=place, device=torch.device("cpu"), mesh=mesh)
    return train(job, world, lambda: False)


def lines_of(job: TrainJob) -> list[dict]:
    lines = [json.loads(line) for line in job.folder.metrics.read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


class FailedSave:
    """A save that has failed on rank 1 already, when rank 0 does not know yet."""

    num_asked = 0

    @property
    def done(self) -> bool:
        self.num_asked += 1
        return dist.get_rank() == 1 or self.num_asked > 1

    def check(self) -> None:
        raise CheckpointError("the disk is full")

    def wait(self) -> Path:
        raise CheckpointError("saving step-00000002: the disk is full")


def run_with_a_failing_save(job: TrainJob) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "async_save", lambda *_, **__: FailedSave())
        with pytest.raises(CheckpointError) as caught:
            run_job(job)
    return str(caught.value)


def test_a_save_that_failed_is_raised_by_the_next_step_on_all_ranks(tmp_path):
    job = make_job(tmp_path, steps=50, save_every=2)
    messages = on_ranks(2, run_with_a_failing_save, job)
    assert messages == ["saving step-00000002: the disk is full"] * 2
    assert [line["step"] for line in lines_of(job)] == [1, 2, 3]


def test_checkpoints_stay_as_asked_and_hold_the_config(tmp_path):
    job = make_job(tmp_path, steps=12, save_every=1, keep_last=2, keep_every=5)
    assert on_ranks(2, run_job, job) == [True, True]
    names = sorted(path.name for path in job.folder.checkpoints.glob("step-*"))
    assert names == ["step-00000005", "step-00000010", "step-00000011", "step-00000012"]
    latest = job.folder.checkpoints / "latest"
    assert latest.readlink() == Path("step-00000012")
    training = read_manifest(latest).extra["training"]
    assert training["samples"] == 48
    assert training["config"]["run"]["keep_every"] == 5


@pytest.mark.parametrize("engine", ["fully_shard", "fsdp1-style"])
def test_replicas_train_as_shards_do_and_are_compared(tmp_path, engine):
    sharded = make_job(tmp_path, name="sharded", steps=3)
    hybrid = make_job(tmp_path, name="hybrid", steps=3, replicas=2, engine=engine)
    on_ranks(2, run_job, sharded)
    on_ranks(2, run_job, hybrid)
    found = [line["loss"] for line in lines_of(hybrid)]
    assert found == pytest.approx([line["loss"] for line in lines_of(sharded)], rel=1e-5)
    # Either goes on from the other's checkpoint.
    resumed = resumed_job(
        hybrid.folder.path, {("parallel", "replicas"): 1}, more_steps=1, overwrite=False
    )
    resumed.create(num_ranks=2)
    assert on_ranks(2, run_job, resumed) == [True, True]


def run_with_a_corrupt_replica(job: TrainJob) -> str:
    def step(model, *arguments, **options):
        result = training_step(model, *arguments, **options)
        if dist.get_rank() == 1:
            next(model.parameters()).to_local().detach().view(-1)[0] += 1
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.train.loop.training_step", step)
        with pytest.raises(RankError) as caught:
            run_job(job)
    return str(caught.value)


def test_a_replica_that_parts_from_the_others_ends_the_run(tmp_path):
    job = make_job(tmp_path, steps=3, replicas=2)
    messages = on_ranks(2, run_with_a_corrupt_replica, job)
    assert len(set(messages)) == 1
    assert "replicas of parameter 'embedding.weight': ranks 0, 1 hold different" in messages[0]


def run_with_an_error(job: TrainJob) -> list[str]:
    """The loss raises in the second step, on all ranks, so that none waits for another."""
    notes: list[str] = []
    calls = iter(range(1, 10))

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if next(calls) == 2:
            logits.register_hook(lambda grad: 1 / 0)
        return logits.float().logsumexp(-1).mean()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.train.step.next_token_loss", loss)
        with pytest.raises(ZeroDivisionError) as caught:
            run_job(job)
    notes += getattr(caught.value, "__notes__", ())
    return notes


def test_an_error_tells_its_step(tmp_path):
    job = make_job(tmp_path, steps=5)
    for notes in on_ranks(2, run_with_an_error, job):
        assert any(note.startswith("in step 2") for note in notes), notes
