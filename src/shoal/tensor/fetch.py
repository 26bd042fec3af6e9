"""Fetching: a region of a sharded tensor, brought to whoever asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from shoal.comm.post import carrier
from shoal.comm.transport import Transport
from shoal.errors import UsageError
from shoal.layout.listing import Listing
from shoal.layout.region import Region
from shoal.tensor.deliver import MAX_EXTRA, deliver, num_rounds
from shoal.tensor.device import shared_device
from shoal.tensor.packet import Part
from shoal.tensor.sharded import ShardedTensor

Asked: TypeAlias = Region | tuple[slice, ...] | None
"""A region, the slices that index it, or nothing."""

_NOTHING, _REGION, _INVALID = range(3)


def fetch(tensor: ShardedTensor, region: Asked, *, max_extra: float = MAX_EXTRA) -> Tensor | None:
    """Give this rank the region that it names, as a plain tensor outside of autograd.

    Collective: every rank of the tensor's group calls it, each with a region of its own or with
    None, which answers None. What ranks ask for travels first, in one exchange of a few numbers,
    so that all ranks raise if one of them asks for what does not exist.
    """
    wanted = _ask(tensor, region)
    own = wanted[tensor.placement.rank]
    target = None
    if own is not None:
        device = shared_device(tensor.device, tensor.placement)
        target = torch.empty(own.sizes, dtype=tensor.dtype, device=device)
    asked = Listing((rank, each) for rank, each in enumerate(wanted) if each is not None)
    bring(tensor, asked, target, reason="a fetch", max_extra=max_extra)
    return target


def bring(
    tensor: ShardedTensor,
    wanted: Listing,
    target: Tensor | None,
    *,
    reason: str,
    max_extra: float = MAX_EXTRA,
) -> None:
    """Fill `target` with the region that this rank wants of a tensor: collective.

    `wanted` lists at most one region for each rank, and is the same on all of them.
    """
    placement = tensor.placement
    want: list[Part] = []
    if target is not None:
        want = [(region, target) for region in wanted.regions_of(placement.rank)]
    rounds = num_rounds(
        wanted.numel * tensor.element_size(),
        placement.group.size(),
        max_extra=max_extra,
        num_copies=max(len(wanted.ranks), 1),
    )
    deliver(
        tensor.parts(),
        want,
        placement,
        wanted,
        placement.group,
        device=shared_device(tensor.device, placement),
        rounds=rounds,
        reason=reason,
    )


def _ask(tensor: ShardedTensor, asked: Asked) -> list[Region | None]:
    """Tell all ranks what this one wants, and hear what they want."""
    group, shape = tensor.placement.group, tensor.placement.shape
    problem: UsageError | None = None
    try:
        region = _as_region(asked, shape)
    except UsageError as error:
        region, problem = None, error
    status = _INVALID if problem is not None else _NOTHING if region is None else _REGION
    told = region or Region.whole(shape)
    row = [status, *told.offsets, *told.sizes]
    device = carrier(group, shared_device(tensor.device, tensor.placement))
    sent = torch.tensor(row, dtype=torch.int64, device=device)
    received = sent.new_empty(group.size() * len(row))
    Transport(group).all_gather(received, sent, reason="what ranks want to fetch").wait()
    rows: list[list[int]] = received.view(group.size(), len(row)).tolist()
    invalid = [rank for rank, (status, *_) in enumerate(rows) if status == _INVALID]
    if invalid:
        raise UsageError(
            f"a fetch from a tensor of shape {shape} asks for what it does not have, on ranks "
            f"{invalid} of the group" + (f"; on this one: {problem}" if problem else "")
        ) from problem
    return [_read(row, len(shape)) for row in rows]


def _read(row: Sequence[int], ndim: int) -> Region | None:
    status, *numbers = row
    if status == _NOTHING:
        return None
    return Region(offsets=tuple(numbers[:ndim]), sizes=tuple(numbers[ndim:]))


def _as_region(asked: object, shape: tuple[int, ...]) -> Region | None:
    if asked is None:
        return None
    if isinstance(asked, tuple) and all(isinstance(each, slice) for each in asked):
        asked = _sliced(asked, shape)
    if not isinstance(asked, Region):
        raise UsageError(f"expected a Region, a tuple of slices, or None, got {asked!r}")
    whole = Region.whole(shape)
    if len(asked.sizes) != len(shape) or not whole.contains(asked):
        raise UsageError(f"{asked} is not inside a tensor of shape {shape}")
    return asked


def _sliced(slices: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    if len(slices) > len(shape):
        raise UsageError(f"got {len(slices)} slices for a tensor of shape {shape}")
    slices = (*slices, *[slice(None)] * (len(shape) - len(slices)))
    bounds = [each.indices(size) for each, size in zip(slices, shape, strict=True)]
    if any(step != 1 for _, _, step in bounds):
        raise UsageError(f"expected slices with a step of 1, got {slices}")
    return Region(
        offsets=tuple(start for start, _, _ in bounds),
        sizes=tuple(max(stop - start, 0) for start, stop, _ in bounds),
    )
