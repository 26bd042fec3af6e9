"""Training beside frozen weights: adapters, layers that take turns, memory."""

from typing import Any

import pytest
import torch
from torch import nn

from collectives import LoggedReduce, log_traffic
from differential import DIM, Engine, check_engines_agree, gradients, loss_of, stack, train
from harness import ranks


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


@ranks(2)
def test_frozen_parameters_take_no_gradient_memory() -> None:
    check_engines_agree(reduced_elements, plain=False)
