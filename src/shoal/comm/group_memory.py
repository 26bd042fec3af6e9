"""Collectives in memory that a process group's backend has registered with its network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shoal._torch import collectives, groups


class _GroupMemory:
    """Tensors in memory that a backend has registered with its network."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._backend = groups.allocating_backend(group, device)

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """See `shoal.runtime.policy.Comm`."""
        if self._backend is None:
            return torch.empty(*size, dtype=dtype, device=device)
        return self._backend.allocate_tensor(*size, dtype=dtype, device=device)


class GroupAllGather(_GroupMemory):
    """An all-gather into the backend's memory."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """See `shoal.runtime.policy.AllGather`."""
        return collectives.gather_method(group)(output_tensor, input_tensor)


class GroupReduceScatter(_GroupMemory):
    """A reduce-scatter from the backend's memory."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """See `shoal.runtime.policy.ReduceScatter`."""
        return collectives.scatter_method(group, op)(output_tensor, input_tensor)
