"""The plan of a step beside what the engine really does."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import nn

import zoo
from differential import SHOAL, loss_of, stack
from harness import ranks
from shoal.errors import UsageError
from shoal.fsdp import MixedPrecisionPolicy, fully_shard
from shoal.layout import Even, Flat, Layout, Rows, Whole
from shoal.runtime.observe import plan_of, watch
from shoal.step.action import ActionKind


def launches(model: nn.Module, batch: torch.Tensor) -> tuple[list[str], list[str]]:
    """The units whose gathers and reductions a step launches, in order."""
    with watch(model) as recorder:
        loss_of(model(batch)).backward()
    gathers = [action.unit for action in recorder.actions({ActionKind.GATHER})]
    return gathers, [action.unit for action in recorder.actions({ActionKind.REDUCE})]


def planned(model: nn.Module) -> tuple[list[str], list[str]]:
    schedule = plan_of(model).schedule()
    gathers = [action.unit for action in schedule if action.kind is ActionKind.GATHER]
    return gathers, [action.unit for action in schedule if action.kind is ActionKind.REDUCE]


@ranks(2)
@pytest.mark.parametrize("layout", [Even(), Flat(), Rows(), Whole()], ids=repr)
@pytest.mark.parametrize("reshard", [None, False])
def test_a_step_does_what_its_plan_says(layout: Layout, reshard: bool | None) -> None:
    model: Any = stack()
    for block in model.blocks:
        fully_shard(block, layout=layout, reshard_after_forward=reshard)
    fully_shard(model, layout=layout)
    (batch,) = SHOAL.batches(1)
    before_the_first_step = planned(model)
    assert launches(model, batch) == before_the_first_step
    model.zero_grad()
    assert launches(model, batch) == planned(model) == before_the_first_step


@ranks(2, 4)
@pytest.mark.parametrize("layout", [Even(), Flat(), Rows(), Whole()], ids=repr)
@pytest.mark.parametrize("reshard", [None, False, True])
def test_a_model_is_planned_before_it_is_sharded(
    layout: Layout, reshard: bool | None, world_size: int
) -> None:
    """The plan for so many ranks, from the meta device, is the one that the sharded model has."""
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    how: Any = {"layout": layout, "reshard_after_forward": reshard, "mp_policy": half}
    with torch.device("meta"):
        other: Any = stack()
    other.blocks[1].requires_grad_(False)
    blocks = list(other.blocks)
    planned_before = plan_of(other, world=world_size, units=[*blocks[:1], blocks[1:3]], **how)
    model: Any = stack()
    model.blocks[1].requires_grad_(False)
    fully_shard(model.blocks[0], **how)
    fully_shard(list(model.blocks)[1:3], **how)
    fully_shard(model, **how)
    assert planned_before == plan_of(model)
    assert str(planned_before) == str(plan_of(model))


@ranks(2)
@pytest.mark.parametrize("layout", [Even(), Flat()], ids=repr)
def test_recorded_actions_have_the_bytes_of_the_plan(layout: Layout) -> None:
    model: Any = stack()
    for block in model.blocks:
        fully_shard(block, layout=layout)
    fully_shard(model, layout=layout)
    (batch,) = SHOAL.batches(1)
    with watch(model) as recorder:
        loss_of(model(batch)).backward()
    units = {unit.name: unit for unit in plan_of(model).units}
    performed = recorder.actions()
    for action, planned in zip(performed, plan_of(model).schedule(), strict=True):
        assert (action.kind, action.unit) == (planned.kind, planned.unit)
        if action.kind is ActionKind.REDUCE:  # columns of a matrix have no gaps between them
            needed = sum(4 * prod(param.shape) for param in units[action.unit].parameters)
            assert needed <= action.num_bytes <= planned.num_bytes
        else:
            assert action.num_bytes == planned.num_bytes
    freed = [action for action in performed if action.kind is ActionKind.FREE]
    assert freed
    assert all(action.num_bytes == units[action.unit].gathered_bytes for action in freed)
    assert str(recorder).count("MiB") == sum(action.num_bytes > 0 for action in performed)


@ranks(2)
def test_a_backward_that_raises_ends_nothing_of_the_next_one() -> None:
    """Its reductions were in flight; the next step's waits end the next step's."""
    model = SHOAL.shard(stack())
    (batch,) = SHOAL.batches(1)
    loss_of(model(batch)).backward()
    is_broken = True

    def break_it(_: torch.Tensor) -> None:
        if is_broken:
            raise ArithmeticError("broken")

    def arm(_module: nn.Module, _args: Any, out: torch.Tensor) -> None:
        out.register_hook(break_it)

    model.blocks[0].register_forward_hook(arm)
    with watch(model) as recorder:
        with pytest.raises(ArithmeticError, match="broken"):
            loss_of(model(batch)).backward()
        is_broken = False
        loss_of(model(batch)).backward()
    schedule = plan_of(model).schedule()
    last = recorder.actions()[-len(schedule) :]
    assert [(one.kind, one.unit) for one in last] == [(one.kind, one.unit) for one in schedule]


class Forked(nn.Module):
    """Takes one of two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.last = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return self.last((self.left if left else self.right)(self.first(x)))


@ranks(2)
def test_each_way_through_a_model_is_a_variant() -> None:
    model: Any = Forked()
    for child in (model.first, model.left, model.right, model.last):
        fully_shard(child)
    fully_shard(model)
    x = torch.randn(2, 8)
    for left in (True, False, True, False):
        model(x, left).sum().backward()
    assert set(plan_of(model).variants) == {
        ("first", "left", "last"),
        ("first", "right", "last"),
    }


@ranks(2, 4)
def test_bytes_and_fingerprints(world_size: int) -> None:
    def plan(**options: Any) -> Any:
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        for child in model:
            fully_shard(child, **options)
        return plan_of(fully_shard(model, **options))

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    flat = plan(layout=Flat(), mp_policy=half)
    weight = 64 * 64
    assert [unit.gathered_bytes for unit in flat.units] == [2 * weight] * 2
    assert [unit.reduced_bytes for unit in flat.units] == [4 * weight] * 2
    assert [unit.shard_bytes for unit in flat.units] == [4 * weight // world_size] * 2
    # The last block is still being reduced when the first one computes.
    assert flat.peak_bytes() == 4 * weight + 2 * weight
    assert flat.fingerprint == plan(layout=Flat(), mp_policy=half).fingerprint
    others = [plan(layout=Flat()), plan(layout=Whole(), mp_policy=half), plan(mp_policy=half)]
    assert len({flat.fingerprint, *(other.fingerprint for other in others)}) == 4


SETTINGS: dict[str, Callable[[Any], None]] = {
    "default": lambda model: None,
    "held": lambda model: model.set_reshard_after_forward(False),
    "freed root": lambda model: model.set_reshard_after_forward(True),
    "held after backward": lambda model: model.set_reshard_after_backward(False),
    "without a reduction": lambda model: model.set_requires_gradient_sync(False),
    "unused units": lambda model: model.set_reduce_scatter_unused_params(True),
    "two in flight": lambda model: model.set_reduce_scatter_max_input_buffers(2),
    "two ahead": lambda model: model.set_prefetch_depth(2),
    "none ahead": lambda model: model.set_prefetch_depth(0),
    "named": lambda model: model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]]),
    "named in backward": lambda model: model.set_modules_to_backward_prefetch(
        [model.blocks[1], model.blocks[0]]
    ),
}


@ranks(2)
@pytest.mark.sampled
@pytest.mark.parametrize("case", list(zoo.CASES))
@pytest.mark.parametrize("sets", list(SETTINGS))
@pytest.mark.parametrize("layout", [Even(), Flat(), Whole()], ids=repr)
def test_the_engine_does_what_the_machine_says_action_for_action(
    case: str, sets: str, layout: Layout
) -> None:
    model: Any = zoo.build(case)
    for block in model.blocks:
        fully_shard(block, layout=layout)
    fully_shard(model, layout=layout)
    tokens = next(zoo.batches(1))
    zoo.loss_of(model, tokens).backward()
    SETTINGS[sets](model)
    for _ in range(2):  # in the first one, units are as the settings before have left them
        model.reshard()
        for block in model.blocks:
            block.reshard()
        plan = plan_of(model)
        with watch(model) as recorder:
            zoo.loss_of(model, tokens).backward()
        done = [f"{action.kind} {action.unit}" for action in recorder.actions()]
        assert done == [str(action) for action in plan.schedule()]
    assert str(plan).count("\n") == len(done)


@ranks(2)
def test_prefetch_depths_that_cannot_be(world_size: int) -> None:
    model: Any = fully_shard(nn.Linear(4, 4))
    for depth in (-1, True, 1.5, "2"):
        with pytest.raises(UsageError, match="prefetch depth"):
            model.set_prefetch_depth(depth)
