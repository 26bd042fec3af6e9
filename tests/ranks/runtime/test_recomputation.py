"""Activation checkpointing in every place of a sharded model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from differential import DIM, Block, Engine, check_engines_agree, gradients, loss_of, seeded, train
from harness import ranks


class Recomputing(nn.Module):
    """A stack that recomputes some part of itself."""

    def __init__(self, where: str, reentrant: bool, drop: float = 0.0) -> None:
        super().__init__()
        self.where, self.reentrant = where, reentrant
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Inner(where, self.run, drop) for _ in range(4))
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

    def __init__(self, where: str, run: Callable[..., torch.Tensor], drop: float) -> None:
        super().__init__()
        self.inner, self.where, self.run = Block(), where, run
        self.layer, self.drop = nn.Linear(DIM, DIM), nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "inside":
            return self.run(self.compute, x)
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.inner(x))
        return torch.tanh(self.run(self.layer, x) if self.where == "a layer" else self.layer(x))


PLACES = ["inside", "a layer", "blocks", "some", "pairs of blocks", "everything"]


def recomputing(engine: Engine, where: str, reentrant: bool) -> list[Any]:
    return train(engine, engine.shard(seeded(lambda: Recomputing(where, reentrant))))


@ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", PLACES)
def test_activation_checkpointing(where: str, reentrant: bool) -> None:
    check_engines_agree(recomputing, where, reentrant, exact=False)


def dropping(engine: Engine, where: str, reentrant: bool) -> list[Any]:
    """Each rank draws its own numbers; the unsharded model draws those of all, one by one."""
    model = engine.shard(seeded(lambda: Recomputing(where, reentrant, drop=0.3)))
    me, num_ranks = dist.get_rank(), dist.get_world_size()
    seen: list[Any] = []
    for step, batch in enumerate(engine.batches()):
        parts = {me: batch} if engine.is_sharded else dict(enumerate(batch.chunk(num_ranks)))
        states = {}
        for rank, part in parts.items():
            torch.manual_seed(num_ranks * step + rank)
            (loss_of(model(part)) / len(parts)).backward()
            states[rank] = torch.get_rng_state()
        seen.append([gradients(model), states[me]])
        model.zero_grad()
    return seen


@ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", PLACES)
def test_recomputation_drops_what_the_first_computation_dropped(
    where: str, reentrant: bool
) -> None:
    check_engines_agree(dropping, where, reentrant, exact=False)
