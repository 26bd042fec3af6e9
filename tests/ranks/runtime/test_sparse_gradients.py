"""`nn.Embedding(sparse=True)`: every optimizer that takes its gradients trains as unsharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from differential import check_like_plain, seeded, two_axes
from harness import ranks
from oracle import full
from shoal import replicate
from shoal.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

LAYOUTS: list[Layout] = [Even(), Flat(), Rows(), Block(5), Whole()]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.3),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.3),
}
"""Those of torch.optim that take sparse gradients, but for SparseAdam, which takes no others."""


class Words(nn.Module):
    """A table that is used twice, and a bag of words."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 6, sparse=sparse, padding_idx=2)
        self.bag = nn.EmbeddingBag(11, 6, sparse=sparse, mode="sum")
        self.out = nn.Linear(6, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        twice = self.table(tokens).sum(1) * self.table(tokens.flip(1))[:, 0]
        return self.out(twice + self.bag(tokens % 11))


def trained(model: Any, optimizer: str, *, is_sharded: bool, syncs: Any = None) -> list[Any]:
    """Steps of which the first adds up two backwards."""
    generator = torch.Generator().manual_seed(1)
    made = OPTIMIZERS[optimizer](model.parameters())
    world = dist.get_world_size()
    for index in range(4):
        tokens = torch.randint(13, (4 * world, 3), generator=generator)
        if is_sharded:
            tokens = tokens.chunk(world)[dist.get_rank()]
        if syncs is not None:
            syncs(index != 0)
        model(tokens).square().mean().backward()
        if index > 0:
            made.step()
            made.zero_grad()
    return [full(p.detach()) for p in model.parameters()]


@ranks(2, 4)
@pytest.mark.sampled
@pytest.mark.compose("sparse gradients", "fully_shard", "every layout")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_training(layout: Layout, optimizer: str) -> None:
    model = seeded(Words)
    fully_shard(model.table, layout=layout)
    fully_shard(model, layout=layout)
    seen = trained(model, optimizer, is_sharded=True, syncs=model.set_requires_gradient_sync)
    check_like_plain(seen, trained(seeded(Words), optimizer, is_sharded=False))


@ranks(4)
@pytest.mark.compose("sparse gradients", "HSDP", "offload")
def test_on_two_axes() -> None:
    model = fully_shard(seeded(Words), mesh=two_axes(), offload_policy=CPUOffloadPolicy())
    seen = trained(model, "sgd", is_sharded=True)
    check_like_plain(seen, trained(seeded(Words), "sgd", is_sharded=False))


@ranks(2)
@pytest.mark.compose("sparse gradients", "replicate")
def test_replicas() -> None:
    seen = trained(replicate(seeded(Words)), "adagrad", is_sharded=True)
    check_like_plain(seen, trained(seeded(Words), "adagrad", is_sharded=False))


@ranks(2)
@pytest.mark.compose("sparse gradients", "wrapper")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_wrapper(use_orig_params: bool) -> None:
    model = seeded(Words)
    wrapped = FullyShardedDataParallel(model, use_orig_params=use_orig_params)
    trained(wrapped, "adagrad", is_sharded=True)
    expected = trained(seeded(Words), "adagrad", is_sharded=False)
    with FullyShardedDataParallel.summon_full_params(wrapped):
        check_like_plain([p.detach().clone() for p in wrapped.parameters()], expected)


@ranks(2)
def test_gradients_of_shards_are_dense() -> None:
    """SparseAdam skips the rows that no rank has used, which shards do not know: it says so."""
    model = fully_shard(seeded(Words), layout=Flat())
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    optimizer = torch.optim.SparseAdam([model.table.weight])
    with pytest.raises(RuntimeError, match="SparseAdam does not support dense gradients"):
        optimizer.step()
