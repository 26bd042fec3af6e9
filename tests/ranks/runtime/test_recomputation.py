"""Activation checkpointing in every place of a sharded model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness import ranks
from peers import (
    DIM,
    Engine,
    check_engines_agree,
    mlp,
    train,
)


class Recomputing(nn.Module):
    """A stack that recomputes some part of itself."""

    def __init__(self, where: str, reentrant: bool) -> None:
        super().__init__()
        self.where, self.reentrant = where, reentrant
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Inner(where, self.run) for _ in range(4))
        self.head = nn.Linear(DIM, 3)

    def run(self, function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return checkpoint(function, x, use_reentrant=self.reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "everything":
            return self.run(self.compute, x.detach().requires_grad_())
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.where == "pairs of blocks":
            for index in (0, 2):
                x = self.run(self.pair(index), x)
        else:
            for index, block in enumerate(self.blocks):
                is_outside = self.where == "blocks" or (self.where == "some" and index % 2)
                x = self.run(block, x) if is_outside else block(x)
        return self.head(x)

    def pair(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: self.blocks[index + 1](self.blocks[index](x))


class Inner(nn.Module):
    """A block that may recompute inside itself, all of it or a layer."""

    def __init__(self, where: str, run: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.where, self.run = mlp(), where, run
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "inside":
            return self.run(self.compute, x)
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        return torch.tanh(self.run(self.layer, x) if self.where == "a layer" else self.layer(x))


def recomputing(engine: Engine, where: str, reentrant: bool) -> list[Any]:
    torch.manual_seed(0)
    return train(engine, engine.shard(Recomputing(where, reentrant)))


@ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "where", ["inside", "a layer", "blocks", "some", "pairs of blocks", "everything"]
)
def test_activation_checkpointing(where: str, reentrant: bool) -> None:
    check_engines_agree(recomputing, where, reentrant, exact=False)
