"""Moving sharded tensors: to another dtype, to another device of every rank, to another group."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shoal._torch import operators
from shoal.tensor import remote
from shoal.tensor.placement import Placement
from shoal.tensor.sharded import ShardedTensor, relaid

_KEPT = (torch.preserve_format, torch.contiguous_format)


def to(tensor: ShardedTensor, *args: Any, **kwargs: Any) -> ShardedTensor:
    """Do as `Tensor.to` does; returns the tensor itself where nothing changes."""
    group = kwargs.pop("process_group", None)
    copy = kwargs.pop("copy", False)
    try:
        device, dtype, non_blocking, memory_format = operators.parsed_to(*args, **kwargs)
    except TypeError as error:
        raise RuntimeError(
            f"ShardedTensor.to() have wrong arguments: {args}, {kwargs}: {error}"
        ) from error
    _check_format(memory_format)
    if device is None:
        device = tensor.device
    elif tensor.placement.shards_stand_alone:
        device = _current(device)
    moved: Any = Tensor.to(tensor, device, dtype or tensor.dtype, non_blocking, copy)
    return _placed(tensor, moved, device, group)


def to_cpu(
    tensor: ShardedTensor, memory_format: torch.memory_format, group: ProcessGroup | None
) -> ShardedTensor:
    """Do as `ShardedTensor.cpu` says."""
    _check_format(memory_format)
    device = torch.device("cpu")
    return _placed(tensor, Tensor.to(tensor, device), device, group)


def to_cuda(
    tensor: ShardedTensor,
    device: torch.device | str | int | None,
    non_blocking: bool,
    memory_format: torch.memory_format,
    group: ProcessGroup | None,
) -> ShardedTensor:
    """Do as `ShardedTensor.cuda` says."""
    _check_format(memory_format)
    current = torch.device("cuda", torch.cuda.current_device())
    if device is not None and torch.device(device) != current:
        raise AssertionError(
            f"a ShardedTensor moves to each rank's current device, here {current}, got {device}: "
            "call torch.cuda.set_device first, or reshard"
        )
    moved = Tensor.to(tensor, current, non_blocking=non_blocking)
    return _placed(tensor, moved, current, group, always=True)


def _placed(
    tensor: ShardedTensor,
    moved: Any,
    device: torch.device,
    group: ProcessGroup | None,
    *,
    always: bool = False,
) -> ShardedTensor:
    """Say where other ranks' shards are now; this rank's may have been there before."""
    placement: Placement = moved.placement.on(device)
    if group is not None and group is not placement.group:
        placement = placement.within(group)
    if placement is not moved.placement or (always and moved is tensor):
        moved = relaid(moved, placement)
    if moved is not tensor and remote.is_shared(tensor):
        remote.share(moved)
    return moved


def _current(device: torch.device) -> torch.device:
    if device.type != "cuda":
        return device
    current = torch.cuda.current_device()
    if device.index not in (None, current):
        warnings.warn(
            f"ShardedTensor.to moves to each rank's current device, here cuda:{current}, "
            f"not to {device}; use `reshard` to put shards elsewhere",
            stacklevel=4,
        )
    return torch.device("cuda", current)


def _check_format(memory_format: torch.memory_format | None) -> None:
    if memory_format is not None and memory_format not in _KEPT:
        raise RuntimeError(
            "Only `torch.contiguous_format` or `torch.preserve_format` is supported, "
            f"got {memory_format}"
        )
