"""Adafactor on shards: the steps of torch's on whole parameters, whatever cuts them."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import shoal.optim
from harness import ranks
from oracle import full
from shoal.comm.transport import Transport
from shoal.fsdp import fully_shard
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole

LAYOUTS: list[Layout] = [Even(), Flat(), Rows(), Block(5), Whole()]
SHAPES = [(7,), (12, 8), (5, 1), (3, 4, 6), (), (1, 9)]
OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"lr": 0.1, "weight_decay": 0.1, "maximize": True, "d": 1.5, "eps": (1e-4, 1e-2)},
]


class Held(nn.Module):
    """Parameters of all dims, whose forward nobody needs."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for index, shape in enumerate(SHAPES):
            value = nn.Parameter(torch.randn(shape, generator=generator))
            self.register_parameter(f"p{index}", value)

    def forward(self) -> None: ...


def give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        whole = torch.randn(parameter.shape, generator=generator)
        parameter.grad = torch.zeros_like(parameter)
        with torch.no_grad():
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                parameter.grad.copy_(
                    torch.distributed.tensor.distribute_tensor(whole, mesh, placements)
                )
            else:
                parameter.grad.copy_(whole)


def check_alike(model: nn.Module, plain: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p.detach()), q.detach(), msg=lambda m, n=name: f"{n}: {m}")


@ranks(2, 4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=len)
def test_steps_are_those_of_torch(layout: Layout, options: dict[str, Any]) -> None:
    plain, model = Held(), fully_shard(Held(), layout=layout)
    theirs = torch.optim.Adafactor(plain.parameters(), **options)
    ours = shoal.optim.Adafactor(model.parameters(), **options)
    for step in range(3):
        for one in (plain, model):
            give_gradients(one, step)
        theirs.step()
        ours.step()
        check_alike(model, plain)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.state[p].keys() == theirs.state[q].keys()
        for name, value in theirs.state[q].items():
            torch.testing.assert_close(full(ours.state[p][name]), value)
    other = shoal.optim.Adafactor(model.parameters(), **options)
    other.load_state_dict(copy.deepcopy(ours.state_dict()))
    give_gradients(plain, 3)
    give_gradients(model, 3)
    theirs.step()
    other.step()
    check_alike(model, plain)


@ranks(2)
def test_a_step_is_two_collectives() -> None:
    model = fully_shard(Held(), layout=Flat())
    optimizer = shoal.optim.Adafactor(model.parameters())
    give_gradients(model, 0)
    with patch.object(
        Transport, "all_reduce", autospec=True, side_effect=Transport.all_reduce
    ) as all_reduce:
        optimizer.step()
    assert all_reduce.call_count == 2
    assert dist.get_world_size() == 2
