"""Engines beside ranks that torch's `fake` backend only imagines: nobody there to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal import fully_shard, replicate

SIZE = 4


@pytest.fixture(autouse=True, scope="module")
def imagined() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=SIZE, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("engine", [fully_shard, replicate])
def test_a_step_as_one_rank_of_many(engine: Callable[[nn.Module], Any], compiles: bool) -> None:
    torch._dynamo.reset()
    model = engine(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    run = torch.compile(model, backend="shoal", options={"cache": False}) if compiles else model
    run(torch.ones(2, 8)).sum().backward()
    for parameter in model.parameters():
        held = parameter.to_local() if engine is fully_shard else parameter
        grad = parameter.grad.to_local() if engine is fully_shard else parameter.grad
        assert grad.shape == held.shape
        assert held.numel() == parameter.numel() // (SIZE if engine is fully_shard else 1)
