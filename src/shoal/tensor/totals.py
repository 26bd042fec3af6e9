"""Totals over the ranks that hold a tensor: numbers that each rank has a part of.

The numbers travel as one vector of float64 (int64 for whole numbers). So there is one all-reduce
for any number of tensors, and adding up neither overflows nor rounds where a result of the
tensors' own dtype would show it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from shoal.comm.transport import Transport

_LOW = (torch.float16, torch.bfloat16)


def accurate(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a rank computes its part of a number: float32 at least."""
    return torch.float32 if dtype in _LOW else dtype


def lowest_of(dtype: torch.dtype) -> float | int:
    """What never is the largest, unless there is nothing else."""
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def add_up(parts: Tensor, group: ProcessGroup) -> Tensor:
    """Sum a vector over the ranks."""
    total = _widened(parts)
    Transport(group).all_reduce(total, ReduceOp.SUM, reason="a sum over ShardedTensors").wait()
    return total


def largest(parts: Tensor, group: ProcessGroup) -> Tensor:
    """The largest of each element of a vector over the ranks; NaN where any rank has NaN."""
    values = _widened(parts)
    # Backends differ in whether NaN wins a comparison, so it travels beside the values.
    is_nan = values.isnan()
    both = torch.cat([values.masked_fill(is_nan, lowest_of(values.dtype)), is_nan.to(values.dtype)])
    Transport(group).all_reduce(both, ReduceOp.MAX, reason="a maximum of ShardedTensors").wait()
    values, is_nan = both.chunk(2)
    return values.masked_fill(is_nan > 0, torch.nan) if values.is_floating_point() else values


def _widened(parts: Tensor) -> Tensor:
    if parts.is_complex():
        raise NotImplementedError(f"totals of {parts.dtype} over ranks are not supported")
    return parts.to(torch.float64 if parts.is_floating_point() else torch.int64, copy=True)
