"""One rank's tensors on all ranks, in few broadcasts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shoal._torch import kernels
from shoal.comm.buckets import MIB, Item, Limits, assign
from shoal.comm.pending import Pending
from shoal.comm.transport import Transport

_SOURCE = 0
_LIMIT_BYTES = 250 * MIB


def broadcast(tensors: Iterable[Tensor], transport: Transport, *, reason: str) -> None:
    """Overwrite tensors with those of the first rank of a group."""
    if transport.size == 1:
        return
    with torch.no_grad():
        started = [_start(packet, transport, reason) for packet in _packets(tensors)]
        for packet, pending in started:
            flat = pending.wait()
            if len(packet) == 1 and packet[0].data_ptr() == flat.data_ptr():
                continue
            if transport.rank != _SOURCE:
                kernels.foreach_copy(packet, _views(flat, packet))


def _start(packet: list[Tensor], transport: Transport, reason: str) -> tuple[list[Tensor], Pending]:
    first = packet[0]
    if len(packet) == 1 and first.is_contiguous():
        return packet, transport.broadcast(first.detach().view(-1), _SOURCE, reason=reason)
    flat = first.new_empty(sum(tensor.numel() for tensor in packet))
    if transport.rank == _SOURCE:
        kernels.foreach_copy(_views(flat, packet), packet)
    return packet, transport.broadcast(flat, _SOURCE, reason=reason)


def _views(flat: Tensor, packet: list[Tensor]) -> list[Tensor]:
    pieces = flat.split([tensor.numel() for tensor in packet])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, packet, strict=True)]


def _packets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors of one dtype and device together, as many as memory for them is kept small."""
    sent = [tensor.detach() for tensor in tensors if tensor.numel()]
    items = [Item(num_bytes=tensor.nbytes, key=(tensor.dtype, tensor.device)) for tensor in sent]
    buckets = assign(items, range(len(items)), Limits(num_bytes=_LIMIT_BYTES))
    return [[sent[index] for index in bucket] for bucket in buckets]
