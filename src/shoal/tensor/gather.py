"""Gathering one sharded tensor whole: on every rank, or on one."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch import Tensor

from shoal.comm.post import backend_of
from shoal.comm.transport import Transport
from shoal.layout.listing import Listing
from shoal.layout.region import Region
from shoal.layout.stripe import Stripe
from shoal.tensor.fetch import bring
from shoal.tensor.packed import Packed
from shoal.tensor.placement import Placement
from shoal.tensor.sharded import ShardedTensor

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
        bring(tensor, everywhere, full, reason=_REASON)
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
    bring(sent, Listing([(dst, whole)]), target, reason=_REASON)
    if problem is not None:
        raise ValueError(problem)
    if out is not None and target is not None and target is not out:
        with torch.no_grad():
            out.copy_(target)


def _problem(tensor: ShardedTensor, dst: int, out: Tensor | None) -> str | None:
    """What is wrong with an output, if anything is."""
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
        at_row = _from_row(stripe, first_rank)
        at_row.of_full(flat).copy_(at_row.of_rows(rows))


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


def _from_row(stripe: Stripe, first_rank: int) -> Stripe:
    """Where the stripe lies in a matrix that has nothing but this tensor."""
    return replace(stripe, first_rank=stripe.first_rank - first_rank, shard_offset=0)
