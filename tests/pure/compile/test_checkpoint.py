"""Activation checkpointing inside a graph: same gradients, same dropout."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from compile_compare import Given, compare, two_leaves


def block(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.t()).sin() @ w


def block_with_dropout(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout((x @ w.t()).sin(), 0.5) @ w


def once(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(block, x, w, use_reentrant=False) * 2


def with_dropout(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(block_with_dropout, x, w, use_reentrant=False)


def twice(x: Tensor, w: Tensor) -> Tensor:
    y = checkpoint(block_with_dropout, x, w, use_reentrant=False)
    y = F.dropout(y, 0.3)
    return checkpoint(block_with_dropout, y, w, use_reentrant=False)


def without_rng(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(block, x, w, use_reentrant=False, preserve_rng_state=False)


def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def contexts() -> Any:
    return create_selective_checkpoint_contexts(policy)


def selective(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(block, x, w, use_reentrant=False, context_fn=contexts)


def with_view_out(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = checkpoint(block, x, w, use_reentrant=False)
    return y, y[1:]


@pytest.mark.parametrize("fn", [once, twice, with_dropout, without_rng, selective, with_view_out])
def test_functions(fn: Any) -> None:
    compare(fn, two_leaves, scenarios=("train", "infer"), steps=2)


def test_draws_between_forward_and_backward() -> None:
    """Recomputed dropout uses the mask of its forward, whatever the caller drew since."""

    def backward(outputs: Tensor, given: Given) -> None:
        torch.rand(5)
        outputs.sum().backward()
        torch.rand(3)

    compare(twice, two_leaves, backward=backward, scenarios=("train",), steps=2)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Linear(12, 6))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for part in self.blocks:
            x = x + checkpoint(part, x, use_reentrant=False)
        return x


def test_statistics_move_as_in_eager() -> None:
    """BatchNorm inside a checkpointed block, where nothing is recomputed."""

    def run(module: nn.Module, x: Tensor) -> Tensor:
        return module(x)

    def inputs() -> tuple[nn.Module, Tensor]:
        return Blocks(), torch.randn(4, 6)

    # Eager's kernel moves the statistics without a word to autograd.
    compare(run, inputs, scenarios=("infer",), steps=2, ignore=("*.running_*.bumped",))


class Normalised(nn.Module):
    """Batch norm inside of a checkpoint: buffers are written to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def block(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).relu()).sin()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False).sum()


def test_buffers_written_in_a_checkpoint() -> None:
    """As with torch's own compiler, statistics count a step once; eager counts it twice."""
    module, x = Normalised(), torch.randn(6, 4)
    copies = [copy.deepcopy(module) for _ in range(3)]
    for one, backend in zip(copies, (None, "aot_eager", "shoal"), strict=True):
        torch._dynamo.reset()
        call = one if backend is None else torch.compile(one, backend=backend, fullgraph=True)
        for _ in range(2):
            call(x).backward()
    eager, oracle, ours = copies
    for want, got in zip(oracle.buffers(), ours.buffers(), strict=True):
        assert torch.equal(want, got)
    for want, got in zip(eager.parameters(), ours.parameters(), strict=True):
        assert torch.allclose(want.grad, got.grad, atol=1e-6)  # type: ignore[arg-type]
