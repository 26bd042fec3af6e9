"""`set_reduce_scatter_unused_params(True)` where ranks use different units, in different orders.

Units have one size, so that collectives which change places would go unnoticed but for their
numbers. The truth is the unsharded model on the batches of all ranks.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from differential import seeded
from harness import ranks
from oracle import full
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole
from shoal.runtime.fully_shard import fully_shard

DIM, NUM = 6, 3


class Parallel(nn.Module):
    """Equal blocks that read one tensor; a rank's loss is of some of them."""

    def __init__(self, make: Callable[[], nn.Module] = lambda: nn.Linear(DIM, DIM)) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(make() for _ in range(NUM))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = torch.relu(self.stem(x))
        return [block(x) for block in self.blocks]


class Nested(nn.Module):
    """A block with a unit of its size inside."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.relu(self.outer(x)))


class Chain(Parallel):
    """Every block runs twice, on outputs of others."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        once = super().forward(x)
        return [block(y) for block, y in zip(self.blocks, [*once[1:], once[0]], strict=True)]


class Recomputed(Parallel):
    """Blocks that are computed again in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = torch.relu(self.stem(x))
        run = [checkpoint(block, x, use_reentrant=self.use_reentrant) for block in self.blocks]
        return [y for y in run if isinstance(y, torch.Tensor)]


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(10 * step + rank))


def chosen(rank: int, step: int = 0) -> list[int]:
    """The blocks of a rank's loss: never the same on two neighbours, in an order of its own."""
    first = (rank + step) % NUM
    return [first] if (rank + step) % 2 else [(first + 1) % NUM, first]


def loss_of(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    outputs = model(batch(rank, step))
    return torch.stack([outputs[i].square().mean() for i in chosen(rank, step)]).sum()


def shard(model: nn.Module, names: tuple[str, ...] = (), **options: Any) -> Any:
    for block in model.blocks:  # pyright: ignore
        for name in names:
            fully_shard(block.get_submodule(name), **options)
        fully_shard(block, **options)
    fully_shard(model, **options)
    model.set_reduce_scatter_unused_params(True)  # pyright: ignore
    return model


def check(plain: nn.Module, sharded: nn.Module, steps: int = 2) -> None:
    """Step both, and compare gradients in each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(steps):
        torch.stack([loss_of(plain, r, step) for r in range(size)]).mean().backward()
        loss_of(sharded, rank, step).backward()
        compare(plain, sharded)
        with torch.no_grad():
            for model in (plain, sharded):
                for p in model.parameters():
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=0.1)
                model.zero_grad()


def compare(plain: nn.Module, sharded: nn.Module) -> None:
    for (name, p), (_, q) in zip(plain.named_parameters(), sharded.named_parameters(), strict=True):
        expected = torch.zeros_like(p) if p.grad is None else p.grad
        assert q.grad is not None, name
        torch.testing.assert_close(full(q.grad), expected, msg=lambda m, n=name: f"{n}: {m}")


@ranks(2, 4)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_parallel_units(world_size: int, reshard: bool | None) -> None:
    check(seeded(Parallel), shard(seeded(Parallel), reshard_after_forward=reshard))


@ranks(2)
@pytest.mark.parametrize("layout", [Even(), Flat(), Rows(), Block(4), Whole()], ids=repr)
def test_in_every_layout(layout: Layout) -> None:
    check(seeded(Parallel), shard(seeded(Parallel), layout=layout))


@ranks(2, 4)
def test_units_inside_of_units(world_size: int) -> None:
    model = seeded(lambda: Parallel(Nested))
    check(seeded(lambda: Parallel(Nested)), shard(model, ("inner",)))


@ranks(2, 4)
def test_units_that_run_twice(world_size: int) -> None:
    check(seeded(Chain), shard(seeded(Chain)))


@ranks(2)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_units_that_are_recomputed(use_reentrant: bool) -> None:
    def make() -> nn.Module:
        return Recomputed(use_reentrant)

    check(seeded(make), shard(seeded(make)))


@ranks(4)
def test_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    check(seeded(Parallel), shard(seeded(Parallel), mesh=mesh))


@ranks(2, 4)
def test_part_of_the_forward_on_fewer_ranks(world_size: int) -> None:
    check(seeded(Parallel), shard(seeded(Parallel), reshard_after_forward=world_size // 2))


@ranks(2, 4)
def test_units_that_stay_full_after_backward(world_size: int) -> None:
    """They do on all ranks: one that has to gather would meet another's collective."""
    plain, sharded = seeded(Parallel), shard(seeded(Parallel))
    sharded.set_reshard_after_backward(False)
    for step in range(3):
        torch.stack([loss_of(plain, r, step) for r in range(world_size)]).mean().backward()
        loss_of(sharded, dist.get_rank(), step).backward()
    for module in (*sharded.blocks, sharded):
        module.reshard()
    compare(plain, sharded)


@ranks(2)
def test_gradients_kept_from_backwards_without_a_reduction() -> None:
    plain, sharded = seeded(Parallel), shard(seeded(Parallel))
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        sharded.set_requires_gradient_sync(step == 2)
        torch.stack([loss_of(plain, r, step) for r in range(size)]).mean().backward()
        loss_of(sharded, rank, step).backward()
    compare(plain, sharded)


@ranks(2)
def test_prefetch_of_ones_own() -> None:
    sharded = shard(seeded(Parallel))
    blocks = list(sharded.blocks)
    for block, before in zip(blocks, [blocks[-1], *blocks[:-1]], strict=True):
        block.set_modules_to_backward_prefetch([before])
    check(seeded(Parallel), sharded)


@ranks(2)
def test_two_backwards_over_one_graph() -> None:
    plain, sharded = seeded(Chain), shard(seeded(Chain))
    rank, size = dist.get_rank(), dist.get_world_size()
    losses = [loss_of(plain, r) for r in range(size)]
    for keeps in (True, False):
        torch.stack(losses).mean().backward(retain_graph=keeps)
    loss = loss_of(sharded, rank)
    for keeps in (True, False):
        loss.backward(retain_graph=keeps)
    compare(plain, sharded)


@ranks(2)
def test_two_forwards_before_their_backwards() -> None:
    plain, sharded = seeded(Parallel), shard(seeded(Parallel))
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(2):
        torch.stack([loss_of(plain, r, step) for r in range(size)]).mean().backward()
    for loss in [loss_of(sharded, rank, step) for step in range(2)]:
        loss.backward()
    compare(plain, sharded)


@ranks(2)
def test_only_some_units_are_asked_to() -> None:
    """The others are reduced in the same order, so that they may stand between."""
    plain, sharded = seeded(Parallel), shard(seeded(Parallel))
    sharded.set_reduce_scatter_unused_params(False, recurse=False)
    check(plain, sharded)
