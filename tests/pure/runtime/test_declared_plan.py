"""`plan_of` for models that are not sharded: no memory, no process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal.errors import UsageError
from shoal.fsdp import plan_of
from shoal.step.action import ActionKind


class Net(nn.Module):
    """Blocks in a list, one of which has a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.blocks.append(nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 64)))
        self.head = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_blocks_of_lists_are_units_by_default() -> None:
    with torch.device("meta"):
        model = Net()
    assert not dist.is_initialized()
    plan = plan_of(model, world=8)
    names = [unit.name for unit in plan.units]
    assert names == ["root", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    first = plan.units[1]
    assert first.gathered_bytes >= (64 * 64 + 64) * 4
    assert first.shard_bytes * 8 == first.gathered_bytes
    gathers = [action.unit for action in plan.schedule() if action.kind is ActionKind.GATHER]
    assert gathers == [*names, *names[:0:-1]]
    assert "gather  blocks.0" in str(plan)


def test_the_prefetch_depth_is_planned() -> None:
    with torch.device("meta"):
        model = Net()
    shallow, deep = (plan_of(model, world=8, prefetch_depth=depth) for depth in (1, 3))
    assert deep.peak_bytes() > shallow.peak_bytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"units": []}, "needs the number of ranks"),
        ({"world": 0}, "1 or more"),
        ({"world": 2, "units": [nn.Linear(2, 2)]}, "not inside it"),
        ({"world": 2, "units": [3]}, "takes a module"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan_of(Net(), **arguments)
