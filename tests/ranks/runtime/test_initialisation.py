"""Random initialisation after `to_empty`, with one seed on all ranks, is the unsharded model's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from harness import ranks
from oracle import full
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole
from shoal.runtime.fully_shard import fully_shard, replicate

DRAWS: list[Callable[[torch.Tensor], Any]] = [
    nn.init.normal_,
    nn.init.uniform_,
    nn.init.xavier_uniform_,
    nn.init.kaiming_normal_,
    nn.init.trunc_normal_,
]


def make() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 8))


def even_along_both_dims() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(8, 4, bias=False))


@torch.no_grad()
def initialise(model: nn.Module, draw: Callable[[torch.Tensor], Any]) -> nn.Module:
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            draw(parameter)
        else:
            parameter.zero_()
    return model


def check(expected: nn.Module, got: nn.Module) -> None:
    for p, q in zip(expected.parameters(), got.parameters(), strict=True):
        assert torch.equal(full(q.detach()), p)


@ranks(2, 4)
@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("layout", [Even(), Even(1), Flat(), Rows(), Block(4), Whole()], ids=repr)
def test_values_are_those_of_the_unsharded_model(
    world_size: int, layout: Layout, draw: Callable[[torch.Tensor], Any]
) -> None:
    build = even_along_both_dims if layout == Even(1) else make
    check(initialise(build(), draw), initialise(fully_shard(build(), layout=layout), draw))


@ranks(2)
def test_a_dim_of_even_is_that_of_the_parameters() -> None:
    model = fully_shard(even_along_both_dims(), layout=Even(-1)).to_empty(device="cpu")
    (weight,) = model.parameters()
    assert isinstance(weight, DTensor)
    assert weight.placements == (Shard(1),)
    assert weight.to_local().shape == (4, 4)
    uneven = fully_shard(nn.Sequential(nn.Linear(7, 4, bias=False)), layout=Even(1))
    assert uneven[0].weight.to_local().shape == (4, 4 - dist.get_rank())


@ranks(4)
def test_replicas_draw_the_same() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    expected = initialise(make(), nn.init.normal_)
    check(expected, initialise(fully_shard(make(), mesh=mesh), nn.init.normal_))
    check(expected, initialise(replicate(make(), mesh=mesh["replicas"]), nn.init.normal_))


@ranks(2)
def test_generators_of_ones_own_and_later_draws() -> None:
    model, plain = fully_shard(make()), make()
    later = []
    for one in (model, plain):
        generator = torch.Generator().manual_seed(5)
        initialise(one, lambda p, g=generator: p.normal_(generator=g))
        later.append(torch.rand(3))
    check(plain, model)
    assert torch.equal(*later)


@ranks(2)
def test_other_dtensors_on_cpu_draw_the_whole_too() -> None:
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(make())
    torch.manual_seed(3)
    expected = torch.empty(6, 4).normal_()
    for placement in (Shard(0), Shard(1), Replicate()):
        tensor = distribute_tensor(torch.zeros(6, 4), mesh, [placement])
        torch.manual_seed(3)
        assert torch.equal(tensor.normal_().full_tensor(), expected)
