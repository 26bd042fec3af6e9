"""New sharded tensors: each rank fills the shards that a spec gives it, without communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shoal._torch.sharded import ShardingSpec
from shoal.doors.sharded_tensor import remote_shards
from shoal.tensor.listed import Listed
from shoal.tensor.placement import group_or_default
from shoal.tensor.sharded import ShardedTensor, allocate


def empty(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Make a tensor of whatever values its memory has."""
    return ShardedTensor(sharding_spec, *size, **options)


def ones(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Make a tensor of ones."""
    return full(sharding_spec, size, 1, **options)


def zeros(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Make a tensor of zeros."""
    return full(sharding_spec, size, 0, **options)


def full(
    sharding_spec: ShardingSpec, size: Sequence[Any], fill_value: Any, **options: Any
) -> ShardedTensor:
    """Make a tensor of one value."""
    return _filled(lambda local: local.fill_(fill_value), sharding_spec, *size, **options)


def rand(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Draw uniform numbers from [0, 1); each rank draws its own, with its own generator."""
    return _filled(Tensor.uniform_, sharding_spec, *size, **options)


def randn(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Draw normal numbers; each rank draws its own, with its own generator."""
    return _filled(Tensor.normal_, sharding_spec, *size, **options)


def allocate_by_spec(
    spec: ShardingSpec,
    size: Sequence[Any],
    *,
    dtype: torch.dtype | None,
    layout: torch.layout,
    requires_grad: bool,
    pin_memory: bool,
    memory_format: torch.memory_format,
    process_group: ProcessGroup | None,
    init_rrefs: bool,
) -> ShardedTensor:
    """Do what the constructor of `ShardedTensor` does."""
    if not isinstance(spec, ShardingSpec):
        raise ValueError(
            f"Expecting ShardingSpec but got: {type(spec)}; ShardedTensor.of wraps local tensors"
        )
    if layout != torch.strided:
        raise ValueError(f"Only torch.strided layout is currently supported, got {layout}")
    if memory_format != torch.contiguous_format:
        raise ValueError(
            "Only torch.contiguous_format memory_format is currently supported, "
            f"got {memory_format}"
        )
    group = group_or_default(process_group)
    placement = Listed.of_spec(spec, shape_of(size), group, is_pinned=pin_memory)
    tensor = allocate(placement, dtype or torch.get_default_dtype(), requires_grad=requires_grad)
    if init_rrefs:
        remote_shards.share(tensor)
    return tensor


def shape_of(size: Sequence[Any]) -> tuple[int, ...]:
    """Sizes that were given one by one, or as one sequence."""
    if len(size) == 1 and isinstance(size[0], Sequence):
        (size,) = size
    if not all(isinstance(number, int) for number in size):
        raise TypeError(f"size has to be a sequence of ints, found: {[*size]}")
    return tuple(size)


def _filled(
    fill: Callable[[Tensor], object],
    sharding_spec: ShardingSpec,
    *size: Any,
    init_rrefs: bool = False,
    **options: Any,
) -> ShardedTensor:
    tensor = ShardedTensor(sharding_spec, *size, **options)
    with torch.no_grad():
        for local in tensor.locals:
            fill(local)
    if init_rrefs:  # not before: others could look at what is not filled yet
        remote_shards.share(tensor)
    return tensor
