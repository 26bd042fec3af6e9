"""Collectives of the user's own, for units to be given instead of the default ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

# torch 2.13 renamed both and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class OwnMemory:
    """Ordinary memory for what a collective writes to or reads from."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class OwnGather(OwnMemory, AllGather):
    """Gathers as the default does."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class OwnReduce(OwnMemory, ReduceScatter):
    """Reduces as the default does."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        return reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


class SynchronousGather(OwnGather):
    """On the current stream: there is nothing to wait for after it."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        super().__call__(*args, **{**kwargs, "async_op": False})


class SynchronousReduce(OwnReduce):
    """Likewise."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        super().__call__(*args, **{**kwargs, "async_op": False})


class Logged(OwnMemory):
    """Remembers its buffers, and writes into a log that others share, for whom it was called."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.buffers: list[torch.Tensor] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.buffers.append(super().allocate(size, dtype=dtype, device=device))
        return self.buffers[-1]


class LoggedGather(Logged, OwnGather):
    """Writes down when it is launched."""

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        self.log.append(f"gather {self.name}")
        return super().__call__(*args, **kwargs)


class LoggedReduce(Logged, OwnReduce):
    """Writes down when it is launched, and by which operation."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__(name, log)
        self.ops: list[Any] = []

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.log.append(f"reduce {self.name}")
        self.ops.append(op)
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


def log_traffic(model: nn.Module) -> list[str]:
    """Log the collectives of every unit below `model`, by the names of their modules."""
    log: list[str] = []
    modules: list[tuple[str, Any]] = list(model.named_modules())
    for name, module in modules:
        if hasattr(module, "set_custom_all_gather"):
            module.set_custom_all_gather(LoggedGather(name or "root", log))
            module.set_custom_reduce_scatter(LoggedReduce(name or "root", log))
    return log
