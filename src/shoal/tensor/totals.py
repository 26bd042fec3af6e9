"""Totals over the ranks that hold a tensor: numbers that each rank has a part of.

The numbers travel as one vector of float64 (two for a complex number, int64 for a whole one). So
there is one all-reduce for any number of tensors, and adding up neither overflows nor rounds where
a result of the tensors' own dtype would show it.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from shoal.comm.post import carrier
from shoal.comm.transport import Transport
from shoal.tensor.device import shared_device
from shoal.tensor.placement import Placement

_LOW = (torch.float16, torch.bfloat16)


class MeshAxis(NamedTuple):
    """The ranks along one axis of a DTensor's mesh."""

    group: ProcessGroup


Holders: TypeAlias = Placement | MeshAxis
"""The ranks of a group that have parts of a tensor, all on one type of device if a DTensor's."""


def accurate(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a rank computes its part of a number: float32 at least."""
    return torch.float32 if dtype in _LOW else dtype


def lowest_of(dtype: torch.dtype) -> float | int:
    """What never is the largest, unless there is nothing else."""
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def add_up(parts: Tensor, placement: Holders) -> Tensor:
    """Sum a vector over the ranks of a tensor that is placed like this."""
    if parts.is_complex():
        pairs = torch.view_as_real(parts)
        return torch.view_as_complex(add_up(pairs.view(-1), placement).view_as(pairs))
    total = _widened(parts, placement)
    Transport(placement.group).all_reduce(
        total, ReduceOp.SUM, reason="a sum over ShardedTensors"
    ).wait()
    return total.to(parts.device)


def largest(parts: Tensor, placement: Holders) -> Tensor:
    """The largest of each element of a vector over the ranks; NaN where any rank has NaN."""
    values = _widened(parts, placement)
    # Backends differ in whether NaN wins a comparison, so it travels beside the values.
    is_nan = values.isnan()
    both = torch.cat([values.masked_fill(is_nan, lowest_of(values.dtype)), is_nan.to(values.dtype)])
    Transport(placement.group).all_reduce(
        both, ReduceOp.MAX, reason="a maximum of ShardedTensors"
    ).wait()
    values, is_nan = both.to(parts.device).chunk(2)
    return values.masked_fill(is_nan > 0, torch.nan) if values.is_floating_point() else values


def _widened(parts: Tensor, placement: Holders) -> Tensor:
    """A copy where the group can carry it: on the same type of device on every rank."""
    device = parts.device
    if isinstance(placement, Placement):
        device = shared_device(device, placement)
    device = carrier(placement.group, device)
    dtype = torch.float64 if parts.is_floating_point() else torch.int64
    return parts.to(device, dtype, copy=True)
