"""A run on ranks against one unsharded process: the same losses, step by step.

The oracle is written out here: a plain module, a plain AdamW, the whole batch at once.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from harness import on_ranks, ranks
from shoal.train.build import build_model, shard_model
from shoal.train.config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from shoal.train.data import load_corpus, sample_offsets, share_of, windows
from shoal.train.environment import Place
from shoal.train.job import TrainJob, new_job, resumed_job
from shoal.train.loop import train
from shoal.train.model import Transformer, next_token_loss
from shoal.train.optimizer import learning_rate
from shoal.train.world import World

STEPS = 12


def make_config(
    folder: Path, *, accumulate: int = 1, precision: Literal["fp32", "bf16"] = "fp32", **parallel
) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(dim=24, layers=2, heads=2, hidden=50, context=24),
        data=DataConfig(max_bytes=100_000),
        # A warm-up and a clip that both matter within a few steps.
        optim=OptimConfig(lr=1e-2, warmup=4, clip=0.5),
        parallel=ParallelConfig(device="cpu", precision=precision, **parallel),
        run=RunConfig(
            steps=STEPS,
            batch_size=8,
            accumulate=accumulate,
            seed=3,
            validate_every=0,
            save_every=5,
            keep_last=0,
            sample_tokens=4,
            out=folder,
            name="run",
        ),
    )


def make_world() -> World:
    rank, size = dist.get_rank(), dist.get_world_size()
    place = Place(rank=rank, world_size=size, local_rank=rank, local_world_size=size)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    return World(place=place, device=torch.device("cpu"), mesh=mesh)


def run_job(job: TrainJob) -> None:
    """Train as one rank of a pool."""
    assert train(job, make_world(), lambda: False)


def steps_of(job: TrainJob) -> list[dict]:
    lines = [json.loads(line) for line in job.folder.metrics.read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def start(config: TrainConfig, world_size: int) -> TrainJob:
    job = new_job(config, overwrite=True)
    job.create(num_ranks=world_size)
    on_ranks(world_size, run_job, job)
    return job


def unsharded(config: TrainConfig) -> tuple[list[float], list[float]]:
    """Train in this process without shoal's engine; return losses and gradient norms."""
    corpus = load_corpus(config.data, config.model.context)
    torch.manual_seed(config.run.seed)
    model = Transformer(config.model)
    optim = config.optim
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(optim.beta1, optim.beta2),
    )
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, STEPS, optim)
        sequences = global_batch(config, corpus, step)
        optimizer.zero_grad()
        loss = next_token_loss(model(sequences[:, :-1]), sequences[:, 1:])
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), optim.clip).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def global_batch(config: TrainConfig, corpus, step: int) -> torch.Tensor:
    batch_size = config.run.batch_size
    offsets = sample_offsets(
        seed=config.run.seed,
        seen=(step - 1) * batch_size,
        num=batch_size,
        num_bytes=len(corpus.training),
        context=config.model.context,
    )
    return windows(corpus.training, offsets, config.model.context)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_the_demo_has_the_losses_of_one_process(tmp_path, world_size):
    """The model, data and optimizer of `shoal train`, on fewer sequences to save time."""
    run = RunConfig(
        steps=STEPS, batch_size=4, validate_every=0, save_every=0, sample_tokens=0, out=tmp_path
    )
    config = TrainConfig(parallel=ParallelConfig(device="cpu", precision="fp32"), run=run)
    steps = steps_of(start(config, world_size))
    losses, norms = unsharded(config)
    assert losses[-1] < losses[0] - 1
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=1e-4)
    assert [step["grad_norm"] for step in steps] == pytest.approx(norms, rel=1e-3)


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, {}),
        (4, {}),
        (2, {"accumulate": 2}),
        (2, {"activation_checkpointing": True}),
        (2, {"engine": "fsdp1-style"}),
        (4, {"engine": "fsdp1-style", "accumulate": 2, "activation_checkpointing": True}),
    ],
    ids=["2ranks", "4ranks", "accumulating", "recomputing", "wrapped", "wrapped_recomputing"],
)
def test_losses_and_gradient_norms_are_those_of_one_process(tmp_path, world_size, options):
    config = make_config(tmp_path, **options)
    steps = steps_of(start(config, world_size))
    losses, norms = unsharded(config)
    assert losses[-1] < losses[0] - 0.5, "a run that learns nothing proves nothing"
    assert min(norms) > config.optim.clip, "a clip that never acts proves nothing"
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=1e-5)
    assert [step["grad_norm"] for step in steps] == pytest.approx(norms, rel=1e-4)
    assert len(steps[0]["memory_bytes"]) == world_size
    for step in steps:
        parts = step["compute_ms"] + step["exposed_ms"] + step["optimizer_ms"]
        assert parts == pytest.approx(step["step_ms"])
        assert min(step["compute_ms"], step["exposed_ms"], step["optimizer_ms"]) > 0


@pytest.mark.parametrize(("precision", "rel"), [("fp32", 1e-6), ("bf16", 1e-2)])
def test_both_engines_have_the_same_losses(tmp_path, precision, rel):
    losses = []
    for engine in ("fully_shard", "fsdp1-style"):
        config = make_config(tmp_path, precision=precision, engine=engine)
        losses.append([step["loss"] for step in steps_of(start(config, 2))])
    assert losses[1] == pytest.approx(losses[0], rel=rel)


def test_a_compiled_run_has_the_losses_of_one_process(tmp_path):
    options = {"accumulate": 2, "activation_checkpointing": True, "compile": "graph"}
    config = make_config(tmp_path, **options)
    config = replace(config, run=replace(config.run, validate_every=4))
    steps = steps_of(start(config, 2))
    losses, norms = unsharded(config)
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=1e-5)
    assert [step["grad_norm"] for step in steps] == pytest.approx(norms, rel=1e-4)
    # Waits are inside of the graphs, where nobody takes their time.
    assert {step["exposed_ms"] for step in steps} == {0}


def my_sequences(config: TrainConfig, world: World) -> torch.Tensor:
    whole = global_batch(config, load_corpus(config.data, config.model.context), step=1)
    indices = share_of(np.arange(len(whole)), rank=world.rank, world_size=world.size)
    return whole[indices]


def gradients_of(model: nn.Module, sequences: torch.Tensor) -> dict[str, torch.Tensor]:
    next_token_loss(model(sequences[:, :-1]), sequences[:, 1:]).backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        gradients[name] = parameter.grad.full_tensor()
    return gradients


def sharded_gradients(config: TrainConfig) -> dict[str, torch.Tensor]:
    world = make_world()
    model = shard_model(build_model(config), config, world)
    return gradients_of(model, my_sequences(config, world))


@ranks(2)
def test_bf16_computes_in_bf16_and_sums_in_fp32():
    """Against torch's own engine under the same policy; a sum in bf16 would be 1e-3 off."""
    config = make_config(Path(), precision="bf16")
    world = make_world()
    sequences = my_sequences(config, world)
    model = build_model(config)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        torch_fully_shard(block, mesh=world.mesh, mp_policy=policy)
    torch_fully_shard(model, mesh=world.mesh, mp_policy=policy)
    expected = gradients_of(model, sequences)
    gradients = gradients_of(shard_model(build_model(config), config, world), sequences)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_are_those_of_one_process(tmp_path, world_size):
    config = make_config(tmp_path)
    corpus = load_corpus(config.data, config.model.context)
    model = build_model(config)
    whole = global_batch(config, corpus, step=1)
    next_token_loss(model(whole[:, :-1]), whole[:, 1:]).backward()
    for gradients in on_ranks(world_size, sharded_gradients, config):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad)


@pytest.mark.parametrize(
    ("world_size", "before", "after"),
    [
        (2, "fully_shard", "fully_shard"),
        (4, "fully_shard", "fully_shard"),
        (2, "fsdp1-style", "fsdp1-style"),
        (4, "fsdp1-style", "fully_shard"),
        (4, "fully_shard", "fsdp1-style"),
    ],
)
def test_a_resumed_run_has_the_losses_of_an_unbroken_one(tmp_path, world_size, before, after):
    """Broken off after step 10, resumed on as many ranks and on more, by either engine."""
    job = start(make_config(tmp_path, engine=before), 2)
    unbroken = steps_of(job)
    # As if it had been killed between the checkpoint at step 10 and the end.
    for path in job.folder.checkpoints.glob("step-00000012*"):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    resumed = resumed_job(job.folder.path, {("parallel", "engine"): after}, more_steps=None)
    assert resumed.checkpoint is not None
    assert resumed.checkpoint.name == "step-00000010"
    on_ranks(world_size, run_job, resumed)
    again = steps_of(resumed)
    assert [step["step"] for step in again] == list(range(1, STEPS + 1))
    expected = [step["loss"] for step in unbroken]
    if world_size == 2:
        assert [step["loss"] for step in again] == expected
    assert [step["loss"] for step in again] == pytest.approx(expected, rel=1e-5)
    assert again[-1]["tokens"] == unbroken[-1]["tokens"] == STEPS * 8 * 24


def test_muon_trains_alike_on_any_ranks_and_after_a_resume(tmp_path):
    config = make_config(tmp_path)
    config = replace(config, optim=replace(config.optim, optimizer="muon"))
    one = start(replace(config, run=replace(config.run, name="one")), 1)
    alone = [step["loss"] for step in steps_of(one)]
    two = start(config, 2)
    losses = [step["loss"] for step in steps_of(two)]
    # Muon computes in bfloat16, which turns other orders of sums into other digits.
    assert losses == pytest.approx(alone, rel=2e-3)
    adamw = replace(config, optim=replace(config.optim, optimizer="adamw"))
    other = start(replace(adamw, run=replace(config.run, name="adamw")), 2)
    assert losses != [step["loss"] for step in steps_of(other)]
    assert losses[-1] < losses[0] - 0.3
    again = resumed_job(
        two.folder.checkpoints / "step-00000005", {}, more_steps=STEPS - 5, overwrite=True
    )
    on_ranks(2, run_job, again)
    assert [step["loss"] for step in steps_of(again)] == losses
