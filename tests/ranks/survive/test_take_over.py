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


class Queue(nn.Module):
    """A buffer that grows, and state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", None)
        self.history: list[float] = []

    def get_extra_state(self):
        return list(self.history)

    def set_extra_state(self, state):
        self.history = state

    def forward(self, inputs):
        mean = inputs.detach().mean(0, keepdim=True)
        self.seen = mean if self.seen is None else torch.cat([self.seen, mean])
        self.history.append(float(len(self.history)))
        return inputs


@ranks(2)
def test_buffers_of_another_shape_and_extra_state_go_back_with_the_state(world_size):
    mesh = init_device_mesh("cpu", (2,))
    model = shard(nn.Sequential(build()[0], Queue(), build()[2], build()[3]), None, mesh)
    state = TrainingState(model, [torch.optim.SGD(model.parameters())], [])
    fresh = state.rest()
    train(model, *state.optimizers, 2)
    rest, seen = state.rest(), model[1].seen
    train(model, *state.optimizers, 1)
    assert model[1].seen.shape[0] == 3
    state.set_rest(rest)
    assert torch.equal(model[1].seen, seen)
    assert model[1].history == [0.0, 1.0]
    state.set_rest(fresh)
    assert model[1].seen is None
    assert model[1].history == []


class CountingOptimizer(torch.optim.SGD):
    """Counts in its groups, and under a key that is no parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["steps"] = 0

    def step(self, closure=None):
        self.param_groups[0]["steps"] += 1
        self.state["all"]["steps"] = self.param_groups[0]["steps"]
        super().step()


@ranks(2)
def test_the_step_that_asks_for_an_optimizers_state_leaves_nothing_behind(world_size):
    model = shard(build(), None, init_device_mesh("cpu", (2,)))
    optimizer, heard = CountingOptimizer(model.parameters()), []
    optimizer.register_step_post_hook(lambda *_: heard.append(1))
    state = TrainingState(model, [optimizer], [])
    before = state.rest().optimizer_groups
    state.check_probe()
    assert state.rest().optimizer_groups == before
    assert not optimizer.state
    assert not heard


@ranks(2)
def test_what_an_optimizer_counts_for_all_parameters_goes_back_with_the_state(world_size):
    mesh = init_device_mesh("cpu", (2,))
    model = shard(build(), None, mesh)
    optimizer = CountingOptimizer(model.parameters())
    state = TrainingState(model, [optimizer], [])
    train(model, optimizer, 2)
    rest, layout = state.rest(), state.layout()
    train(model, optimizer, 1)
    assert optimizer.state["all"] == {"steps": 3}
    state.take_over(FSDPMeshInfo(mesh, 0), layout, rest)
    assert optimizer.state["all"] == {"steps": 2}


@ranks(2)
@pytest.mark.parametrize("layout", [None, Flat()])
def test_gradients_that_a_later_step_adds_to_are_part_of_the_state(world_size, layout):
    mesh = init_device_mesh("cpu", (2,))
    model = shard(build(), layout, mesh)
    optimizer = torch.optim.SGD(model.parameters())
    state = TrainingState(model, [optimizer], [])
    model(torch.ones(2, 7)).sum().backward()
    num_parts = len(state.layout().parts)
    assert not state.carry_gradients({optimizer})  # it has used them
    assert len(state.layout().parts) == num_parts
    assert state.carry_gradients(set())
    layout_now, held = state.layout(), [local.clone() for local in state.locals()]
    assert len(layout_now.parts) == 2 * num_parts
    new = state.take_over(FSDPMeshInfo(mesh, 0), layout_now, state.rest())
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.numel())
    for local, value in zip(new, held, strict=True):
        local.detach().copy_(value)
    assert all(map(torch.equal, state.locals(), held))
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 7)).sum().backward()
    with pytest.raises(NotImplementedError, match="are not reduced at the end of a step"):
        state.carry_gradients(set())


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
