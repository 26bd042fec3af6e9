"""What the loop does beside training: stop together, validate, agree, leave things behind."""

import itertools
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from harness import on_ranks, ranks
from shoal.errors import DivergedError, UsageError
from shoal.train.build import build_model
from shoal.train.config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from shoal.train.data import load_corpus, spread_offsets, windows
from shoal.train.environment import Place
from shoal.train.job import TrainJob, new_job
from shoal.train.loop import train
from shoal.train.model import next_token_loss
from shoal.train.step import training_step
from shoal.train.world import SilentExit, World


def make_world() -> World:
    rank, size = dist.get_rank(), dist.get_world_size()
    place = Place(rank=rank, world_size=size, local_rank=rank, local_world_size=size)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    return World(place=place, device=torch.device("cpu"), mesh=mesh)


def make_job(folder: Path, *, num_ranks: int = 2, lr: float = 1e-30, **run) -> TrainJob:
    config = TrainConfig(
        model=ModelConfig(dim=16, layers=2, heads=2, context=16),
        data=DataConfig(max_bytes=50_000),
        # By default so small a rate that the weights stay where they were.
        optim=OptimConfig(lr=lr, weight_decay=0),
        parallel=ParallelConfig(device="cpu"),
        run=RunConfig(batch_size=4, out=folder, name="run", **run),
    )
    job = new_job(config, overwrite=False)
    job.create(num_ranks=num_ranks)
    return job


def lines_of(job: TrainJob, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in job.folder.metrics.read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def run_until_one_asks(job: TrainJob) -> bool:
    """Only rank 1 is asked to stop, in its third step."""
    world, steps = make_world(), iter(range(1, 100))
    return train(job, world, lambda: next(steps) == 3 and world.rank == 1)


def test_all_ranks_stop_after_the_step_in_which_one_was_asked_to(tmp_path):
    job = make_job(tmp_path, steps=50, validate_every=100)
    assert on_ranks(2, run_until_one_asks, job) == [False, False]
    assert [line["step"] for line in lines_of(job, "step")] == [1, 2, 3]
    assert lines_of(job, "validation") == []
    assert [path.name for path in job.folder.checkpoints.glob("step-*")] == ["step-00000003"]
    assert job.folder.report.exists()
    assert not job.folder.sample.exists()


def run_until_one_diverges(job: TrainJob) -> tuple[str, bool]:
    """The loss of rank 1 is NaN in the third step; return the error, and whether weights moved."""
    world, calls = make_world(), itertools.count(1)
    kept: dict[str, torch.Tensor] = {}

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        broken = next(calls) == 3 and world.rank == 1
        return next_token_loss(logits, targets) * (torch.nan if broken else 1.0)

    def step(model, *arguments, **options):
        kept.update({name: p.detach().clone() for name, p in model.named_parameters()})
        kept["model"] = model
        return training_step(model, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.train.step.next_token_loss", loss)
        patch.setattr("shoal.train.loop.training_step", step)
        with pytest.raises(DivergedError) as caught:
            train(job, world, lambda: False)
    model = kept.pop("model")
    moved = any(
        not torch.equal(before.to_local(), model.get_parameter(name).to_local())
        for name, before in kept.items()
    )
    return str(caught.value), moved


def test_all_ranks_stop_before_a_diverged_step_is_saved(tmp_path):
    job = make_job(tmp_path, lr=1e-2, steps=50, save_every=1, keep_last=0)
    (message, moved), other = on_ranks(2, run_until_one_diverges, job)
    assert other == (message, False)
    assert not moved
    assert message.startswith("step 3: the loss of rank 1 is not finite")
    assert "Go on from step 2 with: shoal train --resume" in message
    names = sorted(path.name for path in job.folder.checkpoints.glob("step-*"))
    assert names == ["step-00000001", "step-00000002"]
    assert [line["loss"] is None for line in lines_of(job, "step")] == [False, False, True]
    assert job.folder.report.exists()


def run_to_the_end(job: TrainJob) -> bool:
    return train(job, make_world(), lambda: False)


def test_a_run_leaves_behind_what_it_promises(tmp_path):
    job = make_job(tmp_path, steps=7, save_every=2, keep_last=2, validate_every=3, sample_tokens=5)
    assert on_ranks(2, run_to_the_end, job) == [True, True]
    folder = job.folder
    assert sorted(path.name for path in folder.checkpoints.glob("step-*")) == [
        "step-00000006",
        "step-00000007",
    ]
    assert [line["step"] for line in lines_of(job, "validation")] == [3, 6, 7]
    assert len(folder.sample.read_text(encoding="utf-8")) > 0
    assert (folder.checkpoints / "latest").readlink() == Path("step-00000007")
    timeline = json.loads(folder.timeline.read_text())
    kinds = {action["kind"] for action in timeline["actions"]}
    assert {
        "forward",
        "backward",
        "gather",
        "wait",
        "free",
        "reduce",
        "finish",
        "optimizer",
    } <= kinds
    assert 1 <= timeline["step"] <= 7
    page = folder.report.read_text(encoding="utf-8")
    assert "Validation loss" in page


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_validation_loss_is_that_of_one_process(tmp_path, world_size):
    job = make_job(tmp_path, num_ranks=world_size, steps=1, validation_batches=3, sample_tokens=0)
    on_ranks(world_size, run_to_the_end, job)
    (line,) = lines_of(job, "validation")
    corpus = load_corpus(job.config.data, 16)
    offsets = spread_offsets(num=12, num_bytes=len(corpus.validation), context=16)
    sequences = windows(corpus.validation, offsets, 16)
    with torch.no_grad():
        loss = next_token_loss(build_model(job.config)(sequences[:, :-1]), sequences[:, 1:])
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-5)


@ranks(2)
def test_ranks_that_read_different_texts_all_hear_of_it():
    world = make_world()
    world.check_same("the text", "same")
    with pytest.raises(UsageError, match="rank 1 and rank 0 differ in the text: b against a"):
        world.check_same("the text", "ab"[world.rank])


@ranks(2)
def test_what_rank_0_makes_is_everyones_and_so_is_its_failure():
    world = make_world()
    assert world.share(lambda: f"made by {world.rank}") == "made by 0"

    def fail() -> None:
        raise UsageError("no such folder")

    if world.leads:
        with pytest.raises(UsageError, match="no such folder"):
            world.share(fail)
    else:
        with pytest.raises(SilentExit) as caught:
            world.share(fail)
        assert caught.value.code == 2


@ranks(2)
def test_gathered_numbers_come_in_the_order_of_ranks():
    world = make_world()
    told = world.gather([world.rank, 0.5])
    assert told.tolist() == [[0, 0.5], [1, 0.5]]
