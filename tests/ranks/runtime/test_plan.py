"""The plan of a step beside what the engine really does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from differential import SHOAL, loss_of, stack
from harness import ranks
from shoal.fsdp import MixedPrecisionPolicy, fully_shard
from shoal.layout import Even, Flat, Layout, Rows, Whole
from shoal.runtime.events import EventKind
from shoal.runtime.observe import plan_of, watch
from shoal.runtime.schedule import ActionKind


def launches(model: nn.Module, batch: torch.Tensor) -> tuple[list[str], list[str]]:
    """The units whose gathers and reductions a step launches, in order."""
    with watch(model) as recorder:
        loss_of(model(batch)).backward()
    events = sorted(recorder.events(), key=lambda event: event.start_us)
    gathers = [event.unit for event in events if event.kind is EventKind.GATHER]
    return gathers, [event.unit for event in events if event.kind is EventKind.REDUCE]


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
    # The last block is being reduced while the first is in its backward.
    assert flat.peak_bytes() == 4 * weight + 2 * weight
    assert flat.fingerprint == plan(layout=Flat(), mp_policy=half).fingerprint
    others = [plan(layout=Flat()), plan(layout=Whole(), mp_policy=half), plan(mp_policy=half)]
    assert len({flat.fingerprint, *(other.fingerprint for other in others)}) == 4
