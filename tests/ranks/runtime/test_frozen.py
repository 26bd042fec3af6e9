"""Training beside frozen weights: adapters, layers that take turns, memory."""

from typing import Any

import pytest
import torch
from torch import nn

from collectives import LoggedReduce, log_traffic
from differential import DIM, SHOAL, Engine, check_engines_agree, gradients, loss_of, stack, train
from harness import ranks
from shoal.layout import Even, Flat, Layout, Rows, Whole


class Adapted(nn.Module):
    """A frozen layer with a small trained one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM).requires_grad_(False)
        self.down = nn.Linear(DIM, 2, bias=False)
        self.up = nn.Linear(2, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.base(x) + self.up(self.down(x)))


def adapted(engine: Engine, frozen: list[str], late: bool) -> list[Any]:
    """Training beside frozen weights; `late` freezes after sharding."""
    model = stack(Adapted)
    shard = engine.shard
    if late:
        model = shard(model)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    if not late:
        model = shard(model)
    return train(engine, model)


@ranks(2, 4)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("frozen", [[], ["first", "head"], ["blocks.1"], ["blocks.0", "first"]])
def test_adapters_beside_frozen_weights(frozen: list[str], late: bool) -> None:
    check_engines_agree(adapted, frozen, late)


def thawed(engine: Engine) -> list[Any]:
    """Layers that are frozen and trained by turns."""
    model = engine.shard(stack(Adapted))
    seen: list[Any] = []
    for index, batch in enumerate(engine.batches(4)):
        model.blocks[0].requires_grad_(index % 2 == 0)
        model.head.requires_grad_(index % 2 == 1)
        loss_of(model(batch)).backward()
        seen.append(gradients(model))
        model.zero_grad()
    return seen


@ranks(2)
def test_parameters_that_are_frozen_and_trained_by_turns() -> None:
    check_engines_agree(thawed)


def reduced_elements(engine: Engine) -> list[Any]:
    """How much is reduced, per unit: nothing for a frozen one."""
    model = stack(Adapted)
    model.blocks[1].requires_grad_(False)
    model = engine.shard(model)
    log = log_traffic(model)
    comms = []
    for module in (model, *model.blocks):
        comms.append(LoggedReduce("", log))
        module.set_custom_reduce_scatter(comms[-1])
    loss_of(model(engine.batches(1)[0])).backward()
    return [sorted(log), [sum(b.numel() for b in comm.buffers) for comm in comms]]


@ranks(2, 4)
@pytest.mark.parametrize("layout", [Even(), Flat(), Rows(), Whole()], ids=repr)
@pytest.mark.parametrize("waits", [False, True])
def test_parameters_frozen_between_forward_and_backward(layout: Layout, waits: bool) -> None:
    """They get nothing of this backward, and keep what waits of the one before."""
    models = stack(Adapted), stack(Adapted)
    sharded: Any = SHOAL.shard(models[1], layout=layout)
    torch.manual_seed(1)
    before, x = torch.randn(2, 3, DIM)
    sharded.set_requires_gradient_sync(not waits)
    for model in models:
        if waits:
            loss_of(model(before)).backward()
        loss = loss_of(model(x))
        for name in ("blocks.0.up", "blocks.1", "head"):
            model.get_submodule(name).requires_grad_(False)
        if model is sharded:
            sharded.set_requires_gradient_sync(True)
        loss.backward()
    theirs = dict(models[0].named_parameters())
    for name, parameter in sharded.named_parameters():
        grad = theirs[name].grad
        assert (parameter.grad is None) == (grad is None), name
        if grad is not None:
            torch.testing.assert_close(parameter.grad.full_tensor(), grad, msg=name)


@ranks(2)
def test_frozen_parameters_take_no_gradient_memory() -> None:
    check_engines_agree(reduced_elements, plain=False)
