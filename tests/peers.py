"""One scenario on several engines: the unsharded model, torch's `fully_shard`, shoal's.

A scenario is a function of an engine that builds, shards and trains, and returns what a user can
observe. Torch's engine says what that must be, to the last bit where two ranks add alike; the
unsharded model says that torch's engine is right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor

from oracle import Block, full

DIM = 6
"""Width of the models here; with an odd inner width, rows divide no world size."""


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

    def part(self, batch: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a global batch."""
        if not self.is_sharded:
            return batch
        return batch.chunk(dist.get_world_size())[dist.get_rank()]

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


class Stack(nn.Module):
    """Blocks of one kind between two layers that belong to the root."""

    def __init__(self, block: Callable[[], nn.Module], num: int) -> None:
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


def mlp() -> nn.Module:
    """The block most scenarios use: uneven rows, a parameter of one element, a buffer."""
    return Block(DIM, "none")


def stack(block: Callable[[], nn.Module] = mlp, num: int = 3) -> Any:
    """A stack with the same weights on every call."""
    torch.manual_seed(0)
    return Stack(block, num)


def inputs(num: int, dim: int = DIM) -> list[torch.Tensor]:
    """Global batches, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4 * dist.get_world_size(), dim, generator=generator) for _ in range(num)]


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """A mean over rows, so that the mean over ranks is the loss of the global batch."""
    return output.float().square().mean()


def copies(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """What the tensors hold now."""
    return {n: None if t is None else t.detach().clone() for n, t in tensors.items()}


def gradients(model: nn.Module) -> dict[str, Any]:
    """Copies of the gradients by name; none where there is none."""
    return copies({name: p.grad for name, p in model.named_parameters()})


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Everything a training step leaves behind."""
    state = {} if optimizer is None else optimizer.state_dict()["state"]
    return {
        "gradients": gradients(model),
        "parameters": copies(dict(model.named_parameters())),
        "buffers": copies(dict(model.named_buffers())),
        "optimizer": {index: copies(values) for index, values in state.items()},
    }


def train(
    engine: Engine,
    model: nn.Module,
    num_steps: int = 3,
    loss: Callable[[Any], torch.Tensor] = loss_of,
) -> list[Any]:
    """Ordinary steps with AdamW, and what each left behind."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[Any] = []
    for batch in inputs(num_steps):
        value = loss(model(engine.part(batch)))
        value.backward()
        seen.append(engine.mean(value))
        seen.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, snapshot(model, optimizer)]


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
) -> None:
    """Run the scenario on torch's engine and on shoal's, and on the unsharded model if asked.

    With two ranks every reduction adds two numbers, in any order the same: exact by default.
    """
    exact = dist.get_world_size() <= 2 if exact is None else exact
    expected = scenario(TORCH, *args)
    if plain:
        check_same(expected, scenario(PLAIN, *args), exact=False, where="torch against plain")
    check_same(scenario(SHOAL, *args), expected, exact=exact, where="shoal against torch")


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
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), where
    if isinstance(expected, DTensor):
        assert isinstance(actual, DTensor), f"{where}: {type(actual)}"
        assert actual.placements == expected.placements, where
        actual, expected = actual.to_local(), expected.to_local()
    if exact:
        assert torch.equal(actual, expected), f"{where}: {actual} differs from {expected}"
    else:
        torch.testing.assert_close(full(actual), expected, msg=lambda m: f"{where}: {m}")


# torch 2.13 renamed both and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class LoggedGather(AllGather):
    """An all-gather that writes down when it is launched, and for whom."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.buffers: list[torch.Tensor] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Give ordinary memory, and remember that it did."""
        self.buffers.append(torch.empty(*size, dtype=dtype, device=device))
        return self.buffers[-1]

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather as the default does."""
        self.log.append(f"gather {self.name}")
        return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class LoggedReduce(ReduceScatter):
    """A reduce-scatter that writes down when it is launched, for whom, and in which dtype."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.buffers: list[torch.Tensor] = []
        self.ops: list[Any] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Give ordinary memory, and remember that it did."""
        self.buffers.append(torch.empty(*size, dtype=dtype, device=device))
        return self.buffers[-1]

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce as the default does."""
        self.log.append(f"reduce {self.name}")
        self.ops.append(op)
        return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def log_traffic(model: nn.Module) -> list[str]:
    """Log the collectives of every unit below `model`, by the names of their modules."""
    log: list[str] = []
    modules: list[tuple[str, Any]] = list(model.named_modules())
    for name, module in modules:
        if hasattr(module, "set_custom_all_gather"):
            module.set_custom_all_gather(LoggedGather(name or "root", log))
            module.set_custom_reduce_scatter(LoggedReduce(name or "root", log))
    return log
