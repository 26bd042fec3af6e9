"""The forecast of the demo's memory on CPU, against what the demo's tensors took."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile, record_function

from harness import on_ranks
from shoal.plan import forecast_setup
from shoal.train.build import build_model, shard_model
from shoal.train.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from shoal.train.environment import Place
from shoal.train.foresight import setup_of, workload_of
from shoal.train.optimizer import make_optimizer
from shoal.train.step import training_step
from shoal.train.world import World

NUM_STEPS = 3


def peak_of_demo(config: TrainConfig, folder: Path) -> int:
    """Train some steps; the most that tensors took in the last one, by the profiler's events."""
    rank, size = dist.get_rank(), dist.get_world_size()
    replicas = config.parallel.replicas
    shape = (size,) if replicas == 1 else (replicas, size // replicas)
    names = ("shard",) if replicas == 1 else ("replicate", "shard")
    place = Place(rank=rank, world_size=size, local_rank=rank, local_world_size=size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    world = World(place=place, device=torch.device("cpu"), mesh=mesh)
    batch, context = config.run.batch_size // size, config.model.context
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = shard_model(build_model(config), config, world)
        optimizer = make_optimizer(model, config.optim)
        gc.collect()
        for step in range(NUM_STEPS):
            tokens = torch.randint(256, (batch, context + 1)).chunk(config.run.accumulate)
            with record_function(f"step {step}"):
                training_step(
                    model, optimizer, tokens, clip=config.optim.clip, accept=lambda _: True
                )
    path = folder / f"{rank}.json"
    profiler.export_chrome_trace(str(path))
    return _peak(json.loads(path.read_text())["traceEvents"], f"step {NUM_STEPS - 1}")


def _peak(events: list[dict], step: str) -> int:
    (last,) = (one for one in events if one["name"] == step and one["ph"] == "X")
    begin, end = last["ts"], last["ts"] + last["dur"]
    memory = sorted(
        (one["ts"], one["args"]["Total Allocated"], one["args"]["Bytes"])
        for one in events
        if one["name"] == "[memory]"
    )
    _, total, first = memory[0]
    before = total - first  # what the process had allocated while another profile ran
    return max(total for at, total, _ in memory if begin <= at <= end) - before


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(),
        TrainConfig(
            model=ModelConfig(dim=96, layers=3),
            parallel=ParallelConfig(replicas=2, activation_checkpointing=True),
            run=RunConfig(accumulate=2),
        ),
    ],
    ids=["demo", "replicas-checkpointing-accumulation"],
)
def test_memory_of_the_demo(config: TrainConfig, tmp_path: Path) -> None:
    """Within a tenth, as the profiler saw the tensors of a real run on two ranks."""
    measured = on_ranks(2, peak_of_demo, config, tmp_path)[0]
    found = forecast_setup(
        workload_of(config, world=2), setup_of(config, world=2, device="cpu"), device="cpu"
    )
    assert found.memory.allocated_peak_bytes == pytest.approx(measured, rel=0.1)
