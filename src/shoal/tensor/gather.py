"""Gathering one sharded tensor whole on every rank."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from shoal.comm.transport import Transport
from shoal.layout.stripe import Stripe
from shoal.tensor.sharded import ShardedTensor


def gather(tensor: ShardedTensor) -> Tensor:
    """Give every rank of the group the whole tensor.

    The pieces meet as the rows of a matrix, one for each rank, and are copied to their places.
    Where few ranks hold anything they broadcast their rows, and the matrix has rows for them alone,
    so that it has never much more than twice the elements of the tensor.
    """
    placement, local = tensor.placement, tensor.local
    full = torch.empty(placement.shape, dtype=local.dtype, device=local.device)
    stripes = placement.packing.stripes(placement.index)
    if not stripes:
        return full
    row_numel = max(stripe.num_bands * stripe.numel for stripe in stripes)
    transport = Transport(placement.group)
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
    return full


def _all_gather(transport: Transport, rows: Tensor, local: Tensor) -> None:
    own = local.view(-1)
    if own.numel() < rows.shape[1]:
        padded = local.new_zeros(rows.shape[1])
        padded[: own.numel()].copy_(own)
        own = padded
    transport.all_gather(rows.view(-1), own, reason="the gather of a ShardedTensor").wait()


def _broadcast(transport: Transport, rows: Tensor, local: Tensor, first_rank: int) -> None:
    own = transport.rank - first_rank
    if 0 <= own < len(rows):
        rows[own, : local.numel()].copy_(local.view(-1))
    started = [
        transport.broadcast(row, first_rank + index, reason="the gather of a ShardedTensor")
        for index, row in enumerate(rows)
    ]
    for pending in started:
        pending.wait()


def _from_row(stripe: Stripe, first_rank: int) -> Stripe:
    """Where the stripe lies in a matrix that has nothing but this tensor."""
    return replace(stripe, first_rank=stripe.first_rank - first_rank, shard_offset=0)
