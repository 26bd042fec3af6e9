"""The same steps with two engines: what each left behind, compared bit by bit.

An engine is the module that has `fully_shard` in it: torch's is the oracle, ours must not be
told apart from it. Both run one after the other on the same ranks, over the same process groups.
"""

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_engine
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import shoal.fsdp as shoal_engine

Module = TypeVar("Module", bound=nn.Module)

DIM = 8
"""Features of every batch."""

ENGINES = (torch_engine, shoal_engine)
"""In this order everywhere: what is expected comes first."""


needs_mesh_dims = pytest.mark.skipif(
    not hasattr(torch_engine, "DataParallelMeshDims"),
    reason="this torch cannot name the data-parallel axes of a larger mesh",
)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def facts(value: Any) -> Any:
    """What can be compared: of a tensor its kind, place and a copy of this rank's bytes."""
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        return {
            "kind": type(value).__name__,
            "shape": tuple(value.shape),
            "stride": value.stride(),
            "placements": value.placements,
            "mesh": (mesh.mesh.tolist(), mesh.mesh_dim_names, mesh.device_type),
            "requires_grad": value.requires_grad,
            "local": facts(value._local_tensor),
        }
    if is_traceable_wrapper_subclass(value):
        names, context = value.__tensor_flatten__()
        inner = {name: facts(getattr(value, name)) for name in names}
        return {"kind": type(value).__name__, "context": context, "inner": inner}
    if isinstance(value, torch.Tensor):
        # A copy: later steps write into the same memory.
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: facts(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [facts(inner) for inner in value]
    return value


def state_of_model(model: nn.Module) -> dict[str, Any]:
    """Parameters, gradients and buffers of this rank, by name, with all that describes them."""
    return {
        "parameters": {name: facts(p) for name, p in named_parameters(model)},
        "gradients": {name: facts(p.grad) for name, p in named_parameters(model)},
        "buffers": {name: facts(b) for name, b in model.named_buffers()},
    }


def named_parameters(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Every name of every parameter: tied ones must stay tied under both."""
    return model.named_parameters(remove_duplicate=False)


def assert_same(expected: Any, got: Any, *, exact: bool = True, where: str = "result") -> None:
    """Compare two results of `facts`, and name the place where they part."""
    if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor):
        kinds = [(type(t), t.dtype, tuple(t.shape), t.device.type) for t in (expected, got)]
        assert kinds[0] == kinds[1], where
        if exact or not expected.is_floating_point():
            assert torch.equal(expected, got), f"{where}: {expected} became {got}"
        else:
            torch.testing.assert_close(got, expected, msg=lambda m: f"{where}: {m}")
    elif isinstance(expected, dict) and isinstance(got, dict):
        assert list(expected) == list(got), where
        for name in expected:
            assert_same(expected[name], got[name], exact=exact, where=f"{where}.{name}")
    elif isinstance(expected, list) and isinstance(got, list):
        assert len(expected) == len(got), where
        for index, (a, b) in enumerate(zip(expected, got, strict=True)):
            assert_same(a, b, exact=exact, where=f"{where}[{index}]")
    elif isinstance(expected, BaseException):
        # Users catch types: ours may be a more special one.
        assert isinstance(got, type(expected)), f"{where}: {expected!r} became {got!r}"
    else:
        assert expected == got, f"{where}: {expected!r} became {got!r}"


def check_engines_agree(
    run: Callable[..., Any], *args: Any, exact: bool | None = None, **kwargs: Any
) -> Any:
    """Run the function with each engine and compare what it returns; give back torch's.

    Two numbers have the same sum in any order, so with two ranks not one bit may differ. The sums
    of more ranks depend on gloo's cuts of the buffer, and buffers are the engine's own affair:
    there only the shape of things is exact, unless the test knows that no sum has more than two.
    """
    expected, got = (facts(run(engine, *args, **kwargs)) for engine in ENGINES)
    if exact is None:
        exact = dist.get_world_size() <= 2
    assert_same(expected, got, exact=exact)
    return expected


def error_of(call: Callable[[], Any]) -> BaseException | None:
    """What a call raises, if it does."""
    try:
        call()
    except Exception as error:
        return error
    return None


def square_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss that every output element takes part in."""
    return model(x).float().pow(2).mean()


def train(
    model: nn.Module,
    batches: Iterable[torch.Tensor],
    *,
    loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor] = square_loss,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    max_norm: float | None = None,
) -> list[Any]:
    """Train; return each step's loss with the state after its backward, and what is left."""
    steps: list[Any] = []
    running = optimizer(model.parameters(), lr=1e-2)
    for x in batches:
        loss = loss_of(model, x)
        loss.backward()
        steps.append([loss.detach(), state_of_model(model)])
        if max_norm is not None:
            steps.append(facts(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        running.step()
        running.zero_grad()
    return [*steps, state_of_model(model), facts(running.state_dict()["state"])]


def my_batches(num: int = 3) -> list[torch.Tensor]:
    """This rank's batches, the same on every call."""
    return _batches_of(dist.get_rank(), num)


def all_batches(num: int = 3) -> list[torch.Tensor]:
    """The batches of all ranks joined, for the unsharded model."""
    of_ranks = [_batches_of(rank, num) for rank in range(dist.get_world_size())]
    return [torch.cat(batch) for batch in zip(*of_ranks, strict=True)]


def _batches_of(rank: int, num: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(4, DIM, generator=generator) for _ in range(num)]


def assert_close_to(plain: nn.Module, sharded: nn.Module) -> None:
    """Parameters and gradients are those of the unsharded model, up to rounding."""
    for (name, p), (_, q) in zip(plain.named_parameters(), sharded.named_parameters(), strict=True):
        torch.testing.assert_close(full(q), p, msg=lambda m, n=name: f"{n}: {m}")
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            torch.testing.assert_close(full(q.grad), p.grad, msg=lambda m, n=name: f"{n}: {m}")


class Block(nn.Module):
    """Rows that divide no world size, a gain shorter than the world, a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 13)
        self.down = nn.Linear(13, DIM)
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x + self.gain * self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Blocks, each its own unit, and a head that belongs to the root."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def seeded(make: Callable[[], Module]) -> Module:
    """The same weights on every call."""
    torch.manual_seed(0)
    return make()


def sharded_stack(fsdp: ModuleType, **options: Any) -> Any:
    """Build a stack and shard it, blocks first."""
    model = seeded(Stack)
    for block in model.blocks:
        fsdp.fully_shard(block, **options)
    return fsdp.fully_shard(model, **options)
