"""A sharded model goes on over other ranks, in place, as one that was sharded there at once."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from harness import ranks
from shoal import fully_shard
from shoal.errors import UsageError
from shoal.layout import Flat, Rows
from shoal.mesh import FSDPMeshInfo
from shoal.runtime.module_state import units_of
from shoal.survive.state import TrainingState
from shoal.survive.take_over import check_can_move, take_over


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 12), nn.Linear(12, 3))


def shard(model: nn.Module, layout, mesh) -> nn.Module:
    for index in (0, 2):
        fully_shard(model[index], mesh=mesh, layout=layout)
    return fully_shard(model, mesh=mesh, layout=layout)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> list[float]:
    losses = []
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(2, 7, generator=generator)
        loss = model(inputs).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def fill_from(model: nn.Module, other: nn.Module) -> None:
    """Take over the local shards of a model that lies alike."""
    for unit, source in zip(units_of(model), units_of(other), strict=True):
        unit.shards.buffer.copy_(source.shards.buffer)


@ranks(4)
@pytest.mark.parametrize("layout", [None, Flat(), Rows()])
@pytest.mark.parametrize("break_off", ["between steps", "in forward", "in backward"])
def test_a_model_that_moved_trains_like_one_that_was_built_there(world_size, layout, break_off):
    whole, smaller = (init_device_mesh("cpu", (size,)) for size in (4, 4))
    plain = build()
    model = shard(copy.deepcopy(plain), layout, whole)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    held = list(model.parameters())
    train(model, optimizer, 2)
    if break_off == "in forward":
        hook = model[3].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 7))
        hook.remove()
    elif break_off == "in backward":
        hook = model[2].register_full_backward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 7, requires_grad=True)).sum().backward()
        hook.remove()
    # Two of the four go on, in groups of their own.
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "shard"))["shard"]
    assert smaller.size() == 4
    take_over(model, FSDPMeshInfo(pair, 0))
    assert all(ours is before for ours, before in zip(model.parameters(), held, strict=True))
    assert all(parameter.grad is None for parameter in held)
    fresh = shard(build(seed=1), layout, pair)
    fill_from(model, fresh)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, fresh)]
    assert train(model, optimizers[0], 3) == train(fresh, optimizers[1], 3)
    for ours, theirs in zip(units_of(model), units_of(fresh), strict=True):
        assert torch.equal(ours.shards.buffer, theirs.shards.buffer)
        assert ours.size == 2


@ranks(2)
def test_generators_go_back_with_the_state(world_size):
    model = shard(build(), None, init_device_mesh("cpu", (2,)))
    state = TrainingState(model, [torch.optim.SGD(model.parameters())], [])
    rest = state.rest()
    drawn = [(torch.rand(3).tolist(), random.random(), np.random.random()) for _ in range(2)]
    assert drawn[0] != drawn[1]
    state.set_rest(rest)
    assert (torch.rand(3).tolist(), random.random(), np.random.random()) == drawn[0]


@ranks(2)
def test_what_cannot_move_is_refused_by_name(world_size):
    with pytest.raises(UsageError, match="without any fully_shard"):
        check_can_move(build())
    model = build()
    fully_shard(model[0])
    with pytest.raises(UsageError, match=r"parameter '2.weight' belongs to no unit"):
        check_can_move(model)
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(NotImplementedError, match="it is replicated"):
        check_can_move(fully_shard(build(), mesh=replicas))
    assert check_can_move(shard(build(), None, init_device_mesh("cpu", (2,))))
    assert dist.is_initialized()
