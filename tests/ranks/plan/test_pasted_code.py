"""The code that a search prints, pasted: it shards the model as the plan says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import ranks
from shoal.layout import Flat
from shoal.plan import Setup
from shoal.runtime.fsdp_module import FSDPModule
from shoal.runtime.policy import MixedPrecisionPolicy

BASE = Setup(world=2)
HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
PLANS = (
    BASE,
    replace(BASE, replicas=2, policy=HALF, checkpointing=True, reshard=False),
    replace(BASE, layout=Flat(), checkpointing=2, blocks_per_unit=2, prefetch_depth=2),
    replace(BASE, checkpointing=(1, 3), micro_batches=3, reshard=1),
)


class Blocks(nn.Module):
    """Four of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


@ranks(2)
@pytest.mark.parametrize("named", [True, False], ids=["units", "default"])
@pytest.mark.parametrize("setup", PLANS, ids=str)
def test_pasted_code_runs(setup: Setup, named: bool) -> None:
    model = Blocks()
    names: dict[str, Any] = {"model": model, "units": lambda model: list(model.blocks)}
    units = "units(model)" if named else "default_units(model)"
    exec(setup.code(units, "cpu"), names)
    assert isinstance(model, FSDPModule)
    sharded = [one for one in model.modules() if isinstance(one, FSDPModule)]
    assert len(sharded) == 5
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)
        model(torch.ones(2, 8)).sum().backward()
    assert all(one.grad is not None for one in model.parameters())
