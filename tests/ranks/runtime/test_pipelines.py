"""Stages of `torch.distributed.pipelining` that are sharded over the data-parallel ranks.

Two stages of two ranks each (or two stages on each pipeline rank); torch's engine under the same
schedule, and the unsharded model, say what gradients must be.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules

from differential import DIM, SHOAL, TORCH, Engine, loss_of
from harness import ranks
from oracle import full
from shoal.comm import observer
from shoal.layout import Flat
from shoal.runtime.module_state import units_of

NUM_MICRO_BATCHES = 4
ROWS = 2
"""Of a micro-batch."""

SINGLE = ["ScheduleGPipe", "Schedule1F1B"]
LOOPED = ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"]
V_SHAPED = ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"]
SPLIT = {"ScheduleInterleavedZeroBubble", *V_SHAPED}
ALL = [name for name in (*SINGLE, *LOOPED, *V_SHAPED) if hasattr(schedules, name)]


class Layers(nn.Module):
    """One stage: two blocks, and a layer of the stage itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 11), nn.ReLU(), nn.Linear(11, DIM)) for _ in range(2)
        )
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def stages(num: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Layers() for _ in range(num)]


def batch_of(place: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(place)
    return torch.randn(NUM_MICRO_BATCHES * ROWS, DIM, generator=generator)


def own_stages(name: str, index: int) -> list[int]:
    """Of two pipeline ranks; all schedules but the single ones have two stages on each."""
    if name in SINGLE:
        return [index]
    return [index, 3 - index] if name in V_SHAPED else [index, index + 2]


def piped(
    engine: Engine, name: str, mesh: DeviceMesh, steps: int = 2, **options: Any
) -> dict[str, Any]:
    """Losses of the last stage, gradients and parameters of this rank's stages."""
    index, place = mesh["pipe"].get_local_rank(), mesh["shard"].get_local_rank()
    mine = own_stages(name, index)
    num = 2 * len(mine)
    modules = [stages(num)[stage] for stage in mine]
    for module in modules:
        engine.shard(module, mesh=mesh["shard"], **options)
    group = mesh["pipe"].get_group()
    device = torch.device("cpu")
    made = [
        PipelineStage(module, stage, num, device, group=group)
        for module, stage in zip(modules, mine, strict=True)
    ]
    schedule = getattr(schedules, name)(
        made[0] if name in SINGLE else made, NUM_MICRO_BATCHES, loss_fn=on_target
    )
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1)
    seen: dict[str, Any] = {"losses": []}
    for step in range(steps):
        losses: list[torch.Tensor] = []
        x = batch_of(10 * step + place)
        if 0 in mine and num - 1 in mine:
            schedule.step(x, target=x, losses=losses)
        elif 0 in mine:
            schedule.step(x)
        else:
            schedule.step(target=x, losses=losses)
        seen["losses"] += [loss.detach().clone() for loss in losses]
        seen[f"gradients {step}"] = [full(p.grad) for m in modules for p in m.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    seen["parameters"] = [full(p.detach()) for m in modules for p in m.parameters()]
    return seen


def on_target(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return loss_of(output - target)


def unsharded(name: str, mesh: DeviceMesh, steps: int = 2) -> dict[str, Any]:
    index = mesh["pipe"].get_local_rank()
    mine = own_stages(name, index)
    modules = stages(2 * len(mine))
    model = nn.Sequential(*modules)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: dict[str, Any] = {}
    for step in range(steps):
        x = torch.cat([batch_of(10 * step + place) for place in range(2)])
        on_target(model(x), x).backward()
        grads = [p.grad.clone() for stage in mine for p in modules[stage].parameters()]
        seen[f"gradients {step}"] = grads
        optimizer.step()
        optimizer.zero_grad()
    seen["parameters"] = [p.detach() for stage in mine for p in modules[stage].parameters()]
    return seen


def mesh_of_two_axes() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "shard"))


@pytest.mark.filterwarnings("ignore")
@ranks(4)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("variant", ["default", "kept after forward", "flat"])
def test_schedules(name: str, variant: str) -> None:
    """Where backward is split, torch's gradients are right only if nothing is freed after forward:
    it looks for the parameters when they are shards again."""
    mesh = mesh_of_two_axes()
    options: dict[str, Any] = {}
    if variant == "kept after forward":
        options["reshard_after_forward"] = False
    layout = {"layout": Flat()} if variant == "flat" else {}
    ours = piped(SHOAL, name, mesh, **options, **layout)
    if options or name not in SPLIT:
        torch.testing.assert_close(ours, piped(TORCH, name, mesh, **options), rtol=0, atol=0)
    plain = unsharded(name, mesh)
    torch.testing.assert_close({key: ours[key] for key in plain}, plain)


@pytest.mark.filterwarnings("ignore")
@ranks(4)
def test_replicated_stages() -> None:
    """`replicate` on units: the same branch of torch's."""
    from shoal.runtime.fully_shard import replicate

    mesh = mesh_of_two_axes()
    replicated = Engine(name="replicate", module="shoal.runtime.fully_shard")

    def shard(self: Engine, model: Any, **options: Any) -> Any:
        for block in model.blocks:
            replicate(block, **options)
        return replicate(model, **options)

    original: Callable[..., Any] = Engine.shard
    Engine.shard = shard  # type: ignore[method-assign]
    try:
        ours = piped(replicated, "Schedule1F1B", mesh)
    finally:
        Engine.shard = original  # type: ignore[method-assign]
    plain = unsharded("Schedule1F1B", mesh)
    torch.testing.assert_close({key: ours[key] for key in plain}, plain)


@pytest.mark.filterwarnings("ignore")
@ranks(4)
@pytest.mark.parametrize("name", ALL)
def test_a_stage_is_unsharded_once_and_reduced_once_in_a_step(name: str) -> None:
    """With `reshard_after_forward=False`, whatever the schedule and the number of micro-batches."""
    mesh = mesh_of_two_axes()
    index = mesh["pipe"].get_local_rank()
    mine = own_stages(name, index)
    num = 2 * len(mine)
    modules = [stages(num)[stage] for stage in mine]
    for module in modules:
        SHOAL.shard(module, mesh=mesh["shard"], reshard_after_forward=False)
    group, device = mesh["pipe"].get_group(), torch.device("cpu")
    made = [
        PipelineStage(module, stage, num, device, group=group)
        for module, stage in zip(modules, mine, strict=True)
    ]
    schedule = getattr(schedules, name)(
        made[0] if name in SINGLE else made, NUM_MICRO_BATCHES, loss_fn=on_target
    )
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1)
    for step in range(2):
        x = batch_of(10 * step + mesh["shard"].get_local_rank())
        reasons = Reasons()
        with observer.observing(reasons):
            if 0 in mine and num - 1 in mine:
                schedule.step(x, target=x)
            elif 0 in mine:
                schedule.step(x)
            else:
                schedule.step(target=x)
        optimizer.step()
        optimizer.zero_grad()
    # In the first step torch runs each stage once more, to know the shapes of what it sends.
    kinds = ("the gather of unit", "the reduction of unit")
    expected = [f"{kind} {unit.name!r}" for kind in kinds for m in modules for unit in units_of(m)]
    assert sorted(reasons.heard) == sorted(expected)


class Reasons:
    """Hears what collectives are launched for."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def launching(self, reason: str, group: object, tensor: object) -> None:
        self.heard.append(reason)

    def in_stream(self, launched: object = None) -> None: ...

    def waiting(self, reason: str) -> None: ...

    def arrived(self) -> None: ...

    def explained(self, failure: str) -> str:
        return failure


@pytest.mark.filterwarnings("ignore")
@ranks(4)
@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble"])
def test_the_example(name: str) -> None:
    path = Path(__file__).parents[3] / "examples" / "pipeline.py"
    spec = importlib.util.spec_from_file_location("pipeline_example", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    found = example.train(name, 3)
    expected = [losses[dist.get_rank() % 2] for losses in example.train_unsharded(name, 3, 2)]
    assert bool(found) == (dist.get_rank() >= 2)
    if found:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
