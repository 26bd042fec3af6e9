"""One scenario on several engines: the unsharded model, torch's `fully_shard`, shoal's.

A scenario is a function of an engine that builds, shards and trains, and returns what a user can
observe. Torch's engine says what that must be, to the last bit where two ranks add alike; the
unsharded model says that torch's engine is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from oracle import full

Module = TypeVar("Module", bound=nn.Module)

DIM = 8
"""Features of every batch."""

needs_mesh_dims = pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"),
    reason="this torch cannot name the data-parallel axes of a larger mesh",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Where the names of `torch.distributed.fsdp` come from; nowhere for the unsharded model."""

    name: str
    module: str | None

    @property
    def api(self) -> Any:
        """The module that has `fully_shard` and its companions."""
        assert self.module is not None, f"{self.name} has no fully_shard"
        return import_module(self.module)

    @property
    def is_sharded(self) -> bool:
        """Whether ranks compute on their own part of the batch."""
        return self.module is not None

    def policy(self, **dtypes: Any) -> Any:
        """A mixed precision policy."""
        return self.api.MixedPrecisionPolicy(**dtypes)

    def shard(
        self, model: nn.Module, dtypes: Mapping[str, Any] | None = None, **options: Any
    ) -> Any:
        """Shard the model's `blocks`, if it has any, then the model."""
        if not self.is_sharded:
            return model
        if dtypes is not None:
            options["mp_policy"] = self.policy(**dtypes)
        for block in getattr(model, "blocks", ()):
            self.api.fully_shard(block, **options)
        return self.api.fully_shard(model, **options)

    def batches(self, num: int = 3) -> list[torch.Tensor]:
        """The same on every call: this rank's rows of each batch, all rows where not sharded."""
        generator = torch.Generator().manual_seed(1)
        world_size, rank = dist.get_world_size(), dist.get_rank()
        whole = [torch.randn(4 * world_size, DIM, generator=generator) for _ in range(num)]
        return [x.chunk(world_size)[rank] for x in whole] if self.is_sharded else whole

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss over the global batch."""
        result = loss.detach().clone()
        if self.is_sharded:
            dist.all_reduce(result)
            result /= dist.get_world_size()
        return result


PLAIN = Engine(name="plain", module=None)
TORCH = Engine(name="torch", module="torch.distributed.fsdp")
SHOAL = Engine(name="shoal", module="shoal.fsdp")


def two_axes(num_replicas: int = 2) -> DeviceMesh:
    """All ranks, as replicas of groups that shard."""
    shape = (num_replicas, dist.get_world_size() // num_replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


class Block(nn.Module):
    """Rows that divide no world size, a gain shorter than the world, a buffer that changes."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 13)
        self.down = nn.Linear(13, DIM)
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """All but the counting."""
        return x + self.gain * self.down(torch.relu(self.up(x)))


class Steady(Block):
    """Changes nothing, for transforms and for compilers that compute twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x)


class Stack(nn.Module):
    """Blocks of one kind between two layers that belong to the root."""

    def __init__(self, block: Callable[[], nn.Module] = Block, num: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(block() for _ in range(num))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        # A block's policy may give its outputs another dtype than the root computes in.
        return self.head(x.to(self.head.weight.dtype))


def seeded(make: Callable[[], Module]) -> Module:
    """The same weights on every call."""
    torch.manual_seed(0)
    return make()


def stack(block: Callable[[], nn.Module] = Block, num: int = 3) -> Any:
    """A stack with the same weights on every call."""
    return seeded(lambda: Stack(block, num))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """A mean over rows, so that the mean over ranks is the loss of the global batch."""
    return output.float().square().mean()


def loss_on(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The loss of a model that takes and returns one tensor."""
    return loss_of(model(x))


def copies(value: Any) -> Any:
    """What nested tensors hold now: later steps write into the same memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, Mapping):
        return {name: copies(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [copies(inner) for inner in value]
    return value


def in_full(value: Any) -> Any:
    """The same observations with every tensor whole; a collective."""
    joined = iter(_joined([leaf for leaf in tree_leaves(value) if _has_rows(leaf)]))

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        found = next(joined) if _has_rows(leaf) else full(leaf.detach())
        return found.requires_grad_(leaf.requires_grad)

    return tree_map(whole, value)


def _has_rows(leaf: Any) -> bool:
    """Whether a tensor's rows are dealt to all ranks, as they mostly are."""
    if not isinstance(leaf, DTensor) or leaf.placements != (Shard(0),):
        return False
    return leaf.device_mesh.size() == dist.get_world_size()


def _joined(tensors: Sequence[DTensor]) -> list[torch.Tensor]:
    """The whole of such tensors in one collective: one for each takes most of a test's time."""
    if not tensors:
        return []
    num_ranks, pieces = dist.get_world_size(), []
    for tensor in tensors:
        local = tensor.to_local().detach()
        piece = local.new_zeros(-(-len(tensor) // num_ranks), *local.shape[1:])
        piece[: len(local)] = local
        pieces.append(piece.flatten().view(torch.uint8).cpu())
    mine = torch.cat(pieces)
    buffers = [torch.empty_like(mine) for _ in range(num_ranks)]
    dist.all_gather(buffers, mine)
    split = [buffer.split([len(piece) for piece in pieces]) for buffer in buffers]
    wholes = []
    for tensor, parts in zip(tensors, zip(*split, strict=True), strict=True):
        rows = torch.cat(parts).view(tensor.dtype).view(-1, *tensor.shape[1:])
        wholes.append(rows[: len(tensor)].to(tensor.device, copy=True))
    return wholes


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every name of every parameter: tied ones must stay tied under all engines."""
    return dict(model.named_parameters(remove_duplicate=False))


def gradients(model: nn.Module) -> dict[str, Any]:
    """Copies of the gradients by name; none where there is none."""
    return copies({name: p.grad for name, p in named_parameters(model).items()})


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Everything a training step leaves behind."""
    return {
        "gradients": gradients(model),
        "parameters": copies(named_parameters(model)),
        "buffers": copies(dict(model.named_buffers())),
        "optimizer": {} if optimizer is None else copies(optimizer.state_dict()["state"]),
    }


def train(
    engine: Engine,
    model: nn.Module,
    batches: Iterable[torch.Tensor] | None = None,
    *,
    loss: Callable[[Any, torch.Tensor], torch.Tensor] = loss_on,
    max_norm: float | None = None,
) -> list[Any]:
    """Ordinary steps with AdamW: the gradients of each, and what the last one left behind."""
    # One operation for all: a DTensor's first meeting with each of AdamW's many takes milliseconds.
    # It takes tensors of one kind.
    fused = len({isinstance(parameter, DTensor) for parameter in model.parameters()}) == 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    seen: list[Any] = []
    for x in engine.batches() if batches is None else batches:
        value = loss(model, x)
        value.backward()
        seen.append([engine.mean(value), gradients(model)])
        if max_norm is not None:
            seen.append(copies(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, snapshot(model, optimizer)]


def train_beside_plain(
    engine: Engine,
    model: nn.Module,
    make: Callable[[], nn.Module],
    loss: Callable[[Any, torch.Tensor], torch.Tensor] = loss_on,
) -> list[Any]:
    """Train a sharded model; the unsharded one that `make` gives must end like it."""
    seen = train(engine, model, loss=loss)
    plain = seeded(make)
    train(PLAIN, plain, loss=loss)
    check_close(model, plain)
    return seen


def error_of(call: Callable[[], Any]) -> Exception | None:
    """The exception that a call raises."""
    try:
        call()
    except Exception as error:
        return error
    return None


def check_names(error: Exception, what: str) -> None:
    """A refusal says what it refuses."""
    assert what in str(error), f"{error!r} does not name {what}"


def check_engines_agree(
    scenario: Callable[..., Any], *args: Any, plain: bool = True, exact: bool | None = None
) -> Any:
    """Run the scenario on torch's engine and on shoal's, and on the unsharded model if asked.

    Two numbers have the same sum in any order, so with two ranks not one bit may differ. The sums
    of more ranks depend on gloo's cuts of the buffer, and buffers are the engine's own affair:
    there only the shape of things is exact, unless the test knows that no sum has more than two.
    Returns what torch's engine showed.
    """
    exact = dist.get_world_size() <= 2 if exact is None else exact
    expected = copies(scenario(TORCH, *args))
    if plain:
        check_like_plain(expected, scenario(PLAIN, *args))
    check_same(scenario(SHOAL, *args), expected, exact=exact, where="shoal against torch")
    return expected


def check_like_plain(sharded: Any, plain: Any) -> None:
    """What a sharded model showed is what the unsharded one showed, up to rounding."""
    check_same(in_full(sharded), copies(plain), exact=False, where="sharded against plain")


def check_close(model: nn.Module, plain: nn.Module) -> None:
    """Parameters and gradients are those of the unsharded model, up to rounding."""
    for observe in (gradients, named_parameters):
        check_like_plain(observe(model), observe(plain))


def check_same(actual: Any, expected: Any, *, exact: bool, where: str) -> None:
    """Compare nested observations; errors are alike when the actual one can be caught as one."""
    if isinstance(expected, Exception):
        assert isinstance(actual, type(expected)), f"{where}: {actual!r}, expected {expected!r}"
    elif isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), f"{where}: {actual!r}"
        _check_tensors(actual, expected, exact, where)
    elif isinstance(expected, Mapping):
        assert list(actual) == list(expected), f"{where}: {list(actual)}, not {list(expected)}"
        for key, value in expected.items():
            check_same(actual[key], value, exact=exact, where=f"{where}: {key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), f"{where}: {actual}, expected {expected}"
        for index, value in enumerate(expected):
            check_same(actual[index], value, exact=exact, where=f"{where}: {index}")
    else:
        assert actual == expected, f"{where}: {actual!r}, expected {expected!r}"


def _check_tensors(actual: torch.Tensor, expected: torch.Tensor, exact: bool, where: str) -> None:
    looks = [
        (_kind(t), t.dtype, t.shape, t.device.type, t.requires_grad) for t in (actual, expected)
    ]
    assert looks[0] == looks[1], f"{where}: {looks[0]}, expected {looks[1]}"
    if is_traceable_wrapper_subclass(expected):
        # Sharded alike, to the strides: then what each rank holds is alike.
        assert _frame(actual) == _frame(expected), f"{where}: {actual}, expected {expected}"
        names, _ = expected.__tensor_flatten__()
        for name in names:
            inner = (getattr(actual, name), getattr(expected, name))
            check_same(*inner, exact=exact, where=f"{where}: {name}")
    elif exact:
        assert torch.equal(actual, expected), f"{where}: {actual} differs from {expected}"
    elif not torch.equal(actual, expected):  # asked first, being a hundred times as fast
        torch.testing.assert_close(actual, expected, msg=lambda m: f"{where}: {m}")


def _kind(tensor: torch.Tensor) -> type:
    """A parameter is as good as its copy, which is none."""
    return torch.Tensor if type(tensor) is nn.Parameter else type(tensor)


def _frame(tensor: Any) -> tuple[Any, ...]:
    """What describes a tensor that consists of others."""
    if not isinstance(tensor, DTensor):
        return tensor.__tensor_flatten__()
    return (tensor.placements, tensor.stride(), tensor.device_mesh)


def kind_of(parameter: torch.Tensor) -> str:
    """The name of a parameter's class; shoal has one of its own for those that rest."""
    return type(parameter).__name__.removeprefix("Held")
