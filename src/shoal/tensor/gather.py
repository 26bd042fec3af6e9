"""Gathers of a whole tensor or of any region of it, and the scatter of a whole tensor.

full_tensor, gather    the whole tensor, on every rank or on one
fetch                  a region for each rank that asks for one
scatter                a whole tensor that one rank has, dealt out as a spec says
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shoal._torch.sharded import ShardingSpec
from shoal.comm.messages import backend_of, carrier_device
from shoal.comm.transport import Transport
from shoal.errors import UsageError
from shoal.layout.listing import Listing
from shoal.layout.region import Region
from shoal.layout.stripe import Stripe
from shoal.tensor.listed import Listed
from shoal.tensor.packed import Packed
from shoal.tensor.placement import Placement, group_or_default, shared_device
from shoal.tensor.sharded import ShardedTensor, allocate
from shoal.tensor.transfer import Part, num_rounds, transfer

Asked: TypeAlias = Region | tuple[slice, ...] | None
"""A region, the slices that index it, or nothing."""

_NOTHING, _REGION, _INVALID = range(3)

_REASON = "the gather of a ShardedTensor"

_STRAIGHT_BYTES = 16 << 20
"""Larger ones need no memory on the way on gloo: 64 MiB on 4 ranks take 0.6 of the time."""


def gather_everywhere(tensor: ShardedTensor) -> Tensor:
    """Give every rank of the group the whole tensor.

    Pieces of a layout meet as the rows of a matrix, one for each rank, and are copied to their
    places. Where few ranks hold anything they broadcast their rows, and the matrix has rows for
    them alone, so that it has never much more than twice the elements of the tensor. Listed shards
    go straight to their places, and so does what is large on gloo.
    """
    placement = tensor.placement
    full = torch.empty(placement.shape, dtype=tensor.dtype, device=tensor.device)
    if not isinstance(placement, Packed) or _goes_straight(full, placement):
        whole = Region.whole(placement.shape)
        everywhere = Listing((rank, whole) for rank in range(placement.group.size()))
        gather_regions(tensor, everywhere, full, reason=_REASON)
        return full
    stripes = placement.packing.stripes(placement.index)
    if stripes:
        _gather_stripes(tensor.local, stripes, Transport(placement.group), full)
    return full


def _goes_straight(full: Tensor, placement: Placement) -> bool:
    backend = backend_of(placement.group, full.device)
    # Where none serves the device, elements are carried by another one, a round at a time.
    return backend is None or (backend == "gloo" and full.nbytes > _STRAIGHT_BYTES)


def gather_on(
    tensor: ShardedTensor,
    dst: int,
    out: Tensor | None,
    *,
    enforce_dtype: bool,
    dtype: torch.dtype | None,
) -> None:
    """Fill `out` on rank `dst` of the group; `dtype` is what elements travel in.

    A rank that was called wrongly takes part all the same, and raises when the others are done.
    """
    if enforce_dtype:
        warnings.warn(
            "`enforce_dtype` is deprecated. Please use `dtype` instead.",
            FutureWarning,
            stacklevel=3,
        )
    placement, group = tensor.placement, tensor.placement.group
    if not 0 <= dst < group.size():
        raise ValueError(f"rank {dst} does not exist: the group has {group.size()} ranks")
    sent = tensor.detach() if dtype is None else tensor.detach().to(dtype)
    assert isinstance(sent, ShardedTensor)
    whole = Region.whole(placement.shape)
    problem = _problem(tensor, dst, out)
    target: Tensor | None = None
    if placement.rank == dst:
        fits = out is not None and problem is None and out.dtype == sent.dtype
        target = out if fits else torch.empty(whole.sizes, dtype=sent.dtype, device=sent.device)
    gather_regions(sent, Listing([(dst, whole)]), target, reason=_REASON)
    if problem is not None:
        raise ValueError(problem)
    if out is not None and target is not None and target is not out:
        with torch.no_grad():
            out.copy_(target)


def _problem(tensor: ShardedTensor, dst: int, out: Tensor | None) -> str | None:
    """The mistake in an output, if there is one."""
    shape, rank = tensor.placement.shape, tensor.placement.rank
    if rank != dst:
        if out is None:
            return None
        return (
            "Argument ``dst_tensor`` must NOT be specified on non-destination ranks: this is rank "
            f"{rank}, the destination is rank {dst}"
        )
    if out is None:
        return f"Argument ``dst_tensor`` must be specified on destination rank {dst}"
    if tuple(out.shape) != shape:
        return f"Argument ``dst_tensor`` have size {tuple(out.shape)}, but should be {shape}"
    return None


def _gather_stripes(
    local: Tensor, stripes: tuple[Stripe, ...], transport: Transport, full: Tensor
) -> None:
    row_numel = max(stripe.num_bands * stripe.numel for stripe in stripes)
    if transport.size * row_numel <= 2 * full.numel():
        first_rank, rows = 0, local.new_empty(transport.size, row_numel)
        _all_gather(transport, rows, local)
    else:
        first_rank = stripes[0].first_rank
        num_holders = stripes[-1].first_rank + stripes[-1].num_ranks - first_rank
        rows = local.new_empty(num_holders, row_numel)
        _broadcast(transport, rows, local, first_rank)
    flat = full.view(-1)
    for stripe in stripes:
        # The matrix has nothing but this tensor, from the first holder on.
        there = replace(stripe, first_rank=stripe.first_rank - first_rank, shard_offset=0)
        there.of_full(flat).copy_(there.of_rows(rows))


def _all_gather(transport: Transport, rows: Tensor, local: Tensor) -> None:
    own = local.view(-1)
    if own.numel() < rows.shape[1]:
        padded = local.new_zeros(rows.shape[1])
        padded[: own.numel()].copy_(own)
        own = padded
    transport.all_gather(rows.view(-1), own, reason=_REASON).wait()


def _broadcast(transport: Transport, rows: Tensor, local: Tensor, first_rank: int) -> None:
    own = transport.rank - first_rank
    if 0 <= own < len(rows):
        rows[own, : local.numel()].copy_(local.view(-1))
    started = [
        transport.broadcast(row, first_rank + index, reason=_REASON)
        for index, row in enumerate(rows)
    ]
    for pending in started:
        pending.wait()


def fetch(tensor: ShardedTensor, region: Asked) -> Tensor | None:
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
    gather_regions(tensor, asked, target, reason="a fetch")
    return target


def gather_regions(
    tensor: ShardedTensor, wanted: Listing, target: Tensor | None, *, reason: str
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
        num_copies=max(len(wanted.ranks), 1),
    )
    transfer(
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
    device = carrier_device(group, shared_device(tensor.device, tensor.placement))
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
    ndim = len(shape)
    return [
        Region(offsets=tuple(numbers[:ndim]), sizes=tuple(numbers[ndim:]))
        if status == _REGION
        else None
        for status, *numbers in rows
    ]


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


def scatter(
    tensor: Tensor, spec: ShardingSpec, src_rank: int, process_group: ProcessGroup | None
) -> ShardedTensor:
    """Deal out the tensor of rank `src_rank`; the other ranks give its shape: collective."""
    group = group_or_default(process_group)
    if not 0 <= src_rank < group.size():
        raise ValueError(f"src_rank {src_rank} does not exist: the group has {group.size()} ranks")
    placement = Listed.of_spec(spec, tensor.shape, group)
    sharded = allocate(placement, tensor.dtype, requires_grad=tensor.requires_grad)
    source = Listing([(src_rank, Region.whole(tensor.shape))])
    transfer(
        [(region, tensor.detach()) for region in source.regions_of(placement.rank)],
        sharded.parts(),
        source,
        placement,
        group,
        device=shared_device(tensor.device, placement),
        rounds=num_rounds(tensor.nbytes, group.size()),
        reason="the scatter of a tensor",
    )
    return sharded
