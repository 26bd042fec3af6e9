"""Carrying out one collective, given the calls of all its ranks.

The oracle in one process: what gloo and NCCL do over a wire, done by copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.comm.calls import Call, Kind, Slots, move
from shoal.comm.reduction import reduce_in_order
from shoal.errors import UsageError


def exchange(calls: Sequence[Call]) -> None:
    """Carry out `calls`, one per rank in rank order, all of the same kind."""
    _EXCHANGE[calls[0].kind](calls)


def _all_gather(calls: Sequence[Call]) -> None:
    for source, call in enumerate(calls):
        for other in calls:
            move(_slots(other.output)[source], _tensor(call.input))


def _reduce_scatter(calls: Sequence[Call]) -> None:
    # All results before the first write: an output may be a piece of an input.
    results = [
        _reduced([_slots(call.input)[rank] for call in calls], calls) for rank in range(len(calls))
    ]
    for call, result in zip(calls, results, strict=True):
        move(_tensor(call.output), result)


def _all_reduce(calls: Sequence[Call]) -> None:
    result = _reduced([_tensor(call.input) for call in calls], calls)
    for call in calls:
        move(_tensor(call.output), result)


def _reduce(calls: Sequence[Call]) -> None:
    result = _reduced([_tensor(call.input) for call in calls], calls)
    move(_tensor(calls[calls[0].root].output), result)


def _broadcast(calls: Sequence[Call]) -> None:
    source = _tensor(calls[calls[0].root].input)
    for call in calls:
        move(_tensor(call.output), source)


def _gather(calls: Sequence[Call]) -> None:
    slots = _slots(calls[calls[0].root].output)
    for source, call in enumerate(calls):
        move(slots[source], _tensor(call.input))


def _scatter(calls: Sequence[Call]) -> None:
    slots = _slots(calls[calls[0].root].input)
    for target, call in enumerate(calls):
        move(_tensor(call.output), slots[target])


def _all_to_all(calls: Sequence[Call]) -> None:
    for target, call in enumerate(calls):
        for source, other in enumerate(calls):
            received, piece = _slots(call.output)[source], _slots(other.input)[target]
            if received.numel() != piece.numel() or received.dtype != piece.dtype:
                raise UsageError(
                    f"all_to_all: rank {source} sends {piece.numel()} of {piece.dtype} to rank "
                    f"{target}, which expects {received.numel()} of {received.dtype} from it"
                )
            move(received, piece)


def _barrier(calls: Sequence[Call]) -> None:
    """Nothing moves: that all ranks came is all there is to it."""


_EXCHANGE: dict[Kind, Callable[[Sequence[Call]], None]] = {
    Kind.ALL_GATHER: _all_gather,
    Kind.REDUCE_SCATTER: _reduce_scatter,
    Kind.ALL_REDUCE: _all_reduce,
    Kind.REDUCE: _reduce,
    Kind.BROADCAST: _broadcast,
    Kind.GATHER: _gather,
    Kind.SCATTER: _scatter,
    Kind.ALL_TO_ALL: _all_to_all,
    Kind.BARRIER: _barrier,
}


def _reduced(pieces: Sequence[Tensor], calls: Sequence[Call]) -> Tensor:
    assert calls[0].op is not None
    pieces = [piece.data.to(pieces[0].device) for piece in pieces]
    result = torch.empty_like(pieces[0], memory_format=torch.contiguous_format)
    reduce_in_order(pieces, calls[0].op, result)
    return result


def _tensor(operand: object) -> Tensor:
    assert isinstance(operand, Tensor)
    return operand


def _slots(operand: object) -> Slots:
    assert isinstance(operand, Slots)
    return operand
