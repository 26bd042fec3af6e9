"""Gradients of earlier micro-batches survive a backward that raises.

The truth is the unsharded model whose backward raises at the same place: what was accumulated until
then stays there too, until somebody zeroes gradients.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
from shoal.fsdp import FullyShardedDataParallel
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole
from shoal.runtime.fully_shard import fully_shard

DIM = 6
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class Layer(nn.Module):
    """Fails when told to: in forward, in backward, or when it is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.fails = ""
        self.recomputes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            y = checkpoint(self.compute, x, use_reentrant=False)
            assert isinstance(y, torch.Tensor)
            return y
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails == "forward" or (
            self.fails == "recomputation" and torch._C._current_graph_task_id() != -1
        ):
            raise ArithmeticError("told to")
        y = torch.relu(self.first(x))
        if self.fails == "backward":  # between the two layers: one has its gradient, one has not
            y.register_hook(_fail)
        y = self.second(y)
        if self.fails == "output":
            y.register_hook(_fail)
        return y


def _fail(_: torch.Tensor) -> None:
    raise ArithmeticError("told to")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(DIM, DIM), nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(10 * step + rank))


class Door:
    """One model, its ways to keep gradients to itself and to look at them."""

    def __init__(self, model: nn.Module, ranks_seen: list[int]) -> None:
        self.model = model
        self.layers: Any = [m for m in model.modules() if isinstance(m, Layer)]
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self._ranks = ranks_seen

    def without_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, step: int, sync: bool) -> None:
        """One backward for each rank; all of them raise, if one does."""
        failure = None
        for rank in self._ranks:
            try:
                with nullcontext() if sync else self.without_sync():
                    loss = self.model(batch(rank, step)).square().mean() / len(self._ranks)
                    loss.backward()
            except ArithmeticError as error:
                failure = error
        if failure is not None:
            raise failure

    def breaks(self, step: int, where: str, layer: int, sync: bool) -> None:
        broken = self.layers[layer]
        broken.fails, broken.recomputes = where, where == "recomputation"
        with pytest.raises(ArithmeticError, match="told to"):
            self.backward(step, sync)
        broken.fails, broken.recomputes = "", False

    def gradients(self) -> list[torch.Tensor]:
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]


class Sharded(Door):
    def without_sync(self) -> AbstractContextManager[None]:
        self.model.set_requires_gradient_sync(False)  # pyright: ignore
        return nullcontext()

    def backward(self, step: int, sync: bool) -> None:
        self.model.set_requires_gradient_sync(True)  # pyright: ignore
        super().backward(step, sync)

    def gradients(self) -> list[torch.Tensor]:
        return [
            torch.zeros(p.shape) if p.grad is None else full(p.grad)
            for p in self.model.parameters()
        ]


class WithoutReplicas(Sharded):
    """Sums over shards, but not over replicas."""

    def without_sync(self) -> AbstractContextManager[None]:
        self.model.set_requires_all_reduce(False)  # pyright: ignore
        return nullcontext()


class Wrapped(Door):
    def without_sync(self) -> AbstractContextManager[None]:
        return self.model.no_sync()  # pyright: ignore

    def gradients(self) -> list[torch.Tensor]:
        """Those of all ranks, end to end: a rank has a piece of each flat parameter."""
        found = []
        for one in FullyShardedDataParallel.fsdp_modules(self.model):
            numel = 2 * DIM * (DIM + 1) if isinstance(one.module, Layer) else DIM * (DIM + 1)
            pieces = [p.grad.flatten() for p in one.params if p.grad is not None]
            mine = torch.cat(pieces) if pieces else torch.zeros(0)
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
            whole = torch.cat(everyone) if any(len(one) for one in everyone) else torch.zeros(numel)
            found.append(whole[:numel])
        return found


def plain() -> Door:
    return Door(seeded(Model), list(range(dist.get_world_size())))


def sharded(kind: type[Sharded] = Sharded, **options: Any) -> Door:
    model = seeded(Model)
    for layer in model.layers:
        fully_shard(layer, **options)
    return kind(fully_shard(model, **options), [dist.get_rank()])


def wrapped(**options: Any) -> Door:
    model = seeded(Model)
    for index, layer in enumerate(model.layers):
        model.layers[index] = FullyShardedDataParallel(layer, **options)
    return Wrapped(FullyShardedDataParallel(model, **options), [dist.get_rank()])


def check(expected: Door, got: Door) -> None:
    flat = [torch.cat([g.flatten() for g in door.gradients()]) for door in (got, expected)]
    torch.testing.assert_close(*flat)


Recovery = Callable[[Door], object]


def go_on(door: Door) -> None:
    """Leave the gradients as they are."""


def zero(door: Door) -> None:
    door.optimizer.zero_grad()


def zero_in_place(door: Door) -> None:
    door.optimizer.zero_grad(set_to_none=False)


def zero_model(door: Door) -> None:
    door.model.zero_grad()


@torch.inference_mode()
def infer(door: Door) -> None:
    """Look at an output; gradients stay ordinary tensors."""
    door.model(batch(0, 0))


RECOVERIES = [go_on, zero, zero_in_place, zero_model, infer]


def run(door: Door, where: str, layer: int, sync: bool, recover: Recovery) -> None:
    door.backward(0, sync=False)
    door.breaks(1, where, layer, sync)
    recover(door)
    door.backward(2, sync=False)
    door.backward(3, sync=True)


@ranks(2)
@pytest.mark.parametrize("recover", RECOVERIES)
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_backward_that_raises(layer: int, sync: bool, recover: Recovery) -> None:
    expected, got = plain(), sharded()
    for door in (expected, got):
        run(door, "backward", layer, sync, recover)
    check(expected, got)


@ranks(2)
@pytest.mark.parametrize("where", ["forward", "recomputation"])
@pytest.mark.parametrize("sync", [False, True])
def test_a_forward_or_a_recomputation_that_raises(where: str, sync: bool) -> None:
    expected, got = plain(), sharded()
    for door in (expected, got):
        run(door, where, 1, sync, go_on)
    check(expected, got)


@ranks(2, 4)
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("layout", [Even(), Flat(), Rows(), Block(4), Whole()], ids=repr)
def test_in_every_layout(world_size: int, layout: Layout, sync: bool) -> None:
    expected, got = plain(), sharded(layout=layout)
    for door in (expected, got):
        run(door, "backward", 1, sync, go_on)
    check(expected, got)


@ranks(2)
@pytest.mark.parametrize("recover", RECOVERIES)
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_in_wrappers(use_orig_params: bool, sync: bool, recover: Recovery) -> None:
    expected, got = plain(), wrapped(use_orig_params=use_orig_params)
    where = "backward" if use_orig_params else "output"  # a flat parameter has one gradient
    for door in (expected, got):
        run(door, where, 1, sync, recover)
    check(expected, got)


@ranks(4)
@pytest.mark.parametrize("recover", RECOVERIES)
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("kind", [Sharded, WithoutReplicas])
def test_with_replicas(kind: type[Sharded], sync: bool, recover: Recovery) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    expected, got = plain(), sharded(kind, mesh=mesh)
    for door in (expected, got):
        run(door, "backward", 1, sync, recover)
    check(expected, got)


@ranks(2)
@pytest.mark.parametrize("sync", [False, True])
def test_in_compiled_layers(sync: bool) -> None:
    expected, got = plain(), sharded()
    for layer in (got.layers[0], got.layers[2]):
        layer.forward = torch.compile(layer.forward, backend="aot_eager")
    for door in (expected, got):
        run(door, "backward", 1, sync, go_on)
    check(expected, got)


@ranks(2)
@pytest.mark.parametrize("recover", RECOVERIES)
def test_an_end_of_backward_that_raises(recover: Recovery) -> None:
    """A hook on a shard's gradient raises where the engine hands gradients out."""
    expected, got = plain(), sharded()
    for door in (expected, got):
        door.backward(0, sync=False)
    handle = got.model.stem.weight.register_post_accumulate_grad_hook(_fail)
    with pytest.raises(ArithmeticError, match="told to"):
        got.backward(1, sync=True)
    handle.remove()
    expected.backward(1, sync=True)
    for door in (expected, got):
        recover(door)
        door.backward(2, sync=True)
    check(expected, got)


@ranks(2)
def test_gradients_that_wait_are_bitwise_what_they_were() -> None:
    """Here the backward breaks before it has accumulated anything."""
    broken, got = sharded(), sharded()
    for door in (broken, got):
        door.backward(0, sync=False)
    broken.model.set_requires_gradient_sync(False)  # pyright: ignore
    output = broken.model(batch(dist.get_rank(), 1))
    output.register_hook(_fail)
    with pytest.raises(ArithmeticError, match="told to"):
        output.sum().backward()
    for door in (broken, got):
        door.backward(2, sync=True)
    for p, q in zip(broken.model.parameters(), got.model.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(full(p.grad), full(q.grad))
