"""What one rank sees of a collective if every other rank is its clone.

Rank 0 of N is alone, so the others are taken to hold the same values as it does: a sum is N times
its own contribution, a mean is its own. Host work does not grow with N where tensors are flat.

Of what others would send, only this rank's own piece is written, in place of all N: the rest of a
gathered buffer stays as it was. `fill` writes all N pieces, so that values stay finite; it costs
memory traffic that a real network causes too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from shoal import _torch
from shoal.comm.calls import Call, Kind, Reduction, Slots, move, reduction_name


def among_clones(call: Call, rank: int, size: int, fill: bool) -> None:
    """Write what `call` gives to rank `rank` of `size`."""
    _APPLY[call.kind](call, rank, size, fill)


def _all_gather(call: Call, rank: int, size: int, fill: bool) -> None:
    assert isinstance(call.input, Tensor)
    assert isinstance(call.output, Slots)
    _spread(call.output, call.input, rank, fill)


def _gather(call: Call, rank: int, size: int, fill: bool) -> None:
    if rank == call.root:
        _all_gather(call, rank, size, fill)


def _reduce_scatter(call: Call, rank: int, size: int, fill: bool) -> None:
    assert isinstance(call.input, Slots)
    _reduce_clones(call.output, call.input[rank], call.op, size)


def _all_reduce(call: Call, rank: int, size: int, fill: bool) -> None:
    _reduce_clones(call.output, call.input, call.op, size)


def _reduce(call: Call, rank: int, size: int, fill: bool) -> None:
    if rank == call.root:
        _all_reduce(call, rank, size, fill)


def _scatter(call: Call, rank: int, size: int, fill: bool) -> None:
    if rank == call.root:
        assert isinstance(call.input, Slots)
        assert isinstance(call.output, Tensor)
        move(call.output, call.input[rank])


def _all_to_all(call: Call, rank: int, size: int, fill: bool) -> None:
    assert isinstance(call.input, Slots)
    assert isinstance(call.output, Slots)
    if call.input[rank].numel() == call.output[rank].numel():
        _spread(call.output, call.input[rank], rank, fill)


def _receive(call: Call, rank: int, size: int, fill: bool) -> None:
    if fill and isinstance(call.output, Tensor):
        call.output.data.zero_()


def _nothing(call: Call, rank: int, size: int, fill: bool) -> None:
    """Nothing changes here: clones hold it already, or nothing comes to this rank."""


_APPLY: dict[Kind, Callable[[Call, int, int, bool], None]] = {
    Kind.ALL_GATHER: _all_gather,
    Kind.REDUCE_SCATTER: _reduce_scatter,
    Kind.ALL_REDUCE: _all_reduce,
    Kind.REDUCE: _reduce,
    Kind.BROADCAST: _nothing,
    Kind.GATHER: _gather,
    Kind.SCATTER: _scatter,
    Kind.ALL_TO_ALL: _all_to_all,
    Kind.BARRIER: _nothing,
    Kind.SEND: _nothing,
    Kind.RECEIVE: _receive,
}


def is_slot(slots: Slots, piece: Tensor, rank: int) -> bool:
    """Whether a piece is this rank's slot, whatever memory its storage will have."""
    if slots.flat is None:
        return False
    slot = slots[rank]
    is_there = piece.storage_offset() == slot.storage_offset() and piece.numel() == slot.numel()
    return is_there and _torch.share_storage(piece, slot)


def _spread(slots: Slots, piece: Tensor, rank: int, fill: bool) -> None:
    if slots.flat is None:
        # Lists are for small things (sizes, pickled objects) that are read when they arrive.
        pieces = [slot.data for slot in slots.pieces]
        _torch.foreach_copy(pieces, [piece.data.reshape(pieces[0].shape)] * slots.size)
    elif not fill:
        # Engines gather in place: then the piece is this rank's slot.
        if piece.data_ptr() != slots.flat.data_ptr() + rank * piece.nbytes:
            move(slots[rank], piece)
    elif slots.is_even:
        # A copy first, since the piece may be one of the slots.
        slots.flat.view(slots.size, -1).copy_(piece.data.reshape(1, -1).clone())
    else:
        piece = piece.data.clone()
        slots.flat.zero_()
        move(slots[rank], piece)


def _reduce_clones(output: object, piece: object, op: Reduction | None, size: int) -> None:
    assert isinstance(output, Tensor)
    assert isinstance(piece, Tensor)
    assert op is not None
    output, piece = output.data, piece.data
    if output.shape != piece.shape:
        piece = piece.reshape(output.shape)
    reduction_of(op)(output, piece, size, op)


def reduction_of(op: Reduction) -> Callable[[Tensor, Tensor, int, Reduction], None]:
    """What writes to an output the reduction of a piece over so many clones."""
    reduce = _REDUCE.get(_torch.reduction_kind(op))
    if reduce is None:
        raise NotImplementedError(f"reduction {reduction_name(op)} is not supported here")
    return reduce


def _sum(output: Tensor, piece: Tensor, size: int, op: Reduction) -> None:
    if piece.dtype == torch.bool:
        return move(output, piece)
    torch.mul(piece, size, out=output)


def _premultiplied_sum(output: Tensor, piece: Tensor, size: int, op: Reduction) -> None:
    torch.mul(piece, size * _torch.premultiplier(op), out=output)


def _product(output: Tensor, piece: Tensor, size: int, op: Reduction) -> None:
    if piece.dtype == torch.bool:
        return move(output, piece)
    torch.pow(piece, size, out=output)


def _xor(output: Tensor, piece: Tensor, size: int, op: Reduction) -> None:
    move(output, piece if size % 2 else torch.zeros_like(piece))


def _same(output: Tensor, piece: Tensor, size: int, op: Reduction) -> None:
    if output.data_ptr() != piece.data_ptr():
        output.copy_(piece)


_REDUCE: dict[ReduceOp.RedOpType, Callable[[Tensor, Tensor, int, Reduction], None]] = {
    ReduceOp.SUM: _sum,
    ReduceOp.PREMUL_SUM: _premultiplied_sum,
    ReduceOp.PRODUCT: _product,
    ReduceOp.BXOR: _xor,
    ReduceOp.AVG: _same,
    ReduceOp.MAX: _same,
    ReduceOp.MIN: _same,
    ReduceOp.BAND: _same,
    ReduceOp.BOR: _same,
}
