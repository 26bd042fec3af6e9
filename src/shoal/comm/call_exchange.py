"""Where the ranks of a group bring their calls, and the last one to come carries them out.

gloo and NCCL send over a wire; here bytes are copied. All of it happens in one process, by one
thread at a time (`turns`), so nothing is locked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.comm.calls import Call, as_slots, as_tensor, move
from shoal.comm.collectives import Kind
from shoal.comm.reduction import reduce_in_order
from shoal.errors import InvariantError, UsageError

Address = tuple[int, int, int, int]
"""Sender, receiver, tag, and which of the messages between them."""


@dataclass(slots=True, eq=False)
class Round:
    """One collective of one group: the calls that came so far."""

    number: int
    group: str
    ranks: Sequence[int]
    calls: dict[int, Sequence[Call]] = field(default_factory=dict)
    done: bool = False

    def join(self, rank: int, calls: Sequence[Call]) -> None:
        """Add a rank's calls; the last one to come carries them out for all."""
        if self.calls:
            first = next(iter(self.calls))
            theirs, ours = _signature(self.calls[first]), _signature(calls)
            if theirs != ours:
                raise InvariantError(
                    f"collective {self.number} of group {self.group!r} differs between ranks: "
                    f"rank {self.ranks[first]} called {theirs}, rank {self.ranks[rank]} {ours}"
                )
        self.calls[rank] = calls
        _synchronize(calls)
        if len(self.calls) == len(self.ranks):
            for same in zip(*(self.calls[each] for each in range(len(self.ranks))), strict=True):
                _EXCHANGE[same[0].kind](same)
            _synchronize(calls)
            self.done = True

    def where(self) -> str:
        """Say what a rank waits for, and for whom."""
        missing = [str(rank) for index, rank in enumerate(self.ranks) if index not in self.calls]
        return (
            f"waits at {_signature(next(iter(self.calls.values())))}, collective {self.number} of "
            f"group {self.group!r}, for rank {', '.join(missing)}"
        )


class CallExchange:
    """The rounds of one group that are not over, and its messages that are not yet read."""

    def __init__(self, group: str, ranks: Sequence[int]) -> None:
        self._group = group
        self._ranks = ranks
        self._rounds: dict[int, Round] = {}
        self._mail: dict[Address, Tensor] = {}

    def join(self, number: int, rank: int, calls: Sequence[Call]) -> Round:
        """Bring a rank's calls to round `number`."""
        if number not in self._rounds:
            self._rounds[number] = Round(number, self._group, self._ranks)
        round = self._rounds[number]
        round.join(rank, calls)
        if round.done:
            del self._rounds[number]
        return round

    def leave(self, address: Address, call: Call) -> None:
        """Leave a copy of a message."""
        self._mail[address] = as_tensor(call.input).data.clone()
        _synchronize([call])

    def has(self, address: Address) -> bool:
        """Whether a message is there."""
        return address in self._mail

    def collect(self, address: Address, call: Call) -> None:
        """Take a message that is there."""
        message, target = self._mail.pop(address), as_tensor(call.output)
        if message.numel() != target.numel() or message.dtype != target.dtype:
            sender, receiver = (self._ranks[rank] for rank in address[:2])
            raise UsageError(
                f"rank {sender} sent {message.numel()} of {message.dtype}, "
                f"rank {receiver} expected {target.numel()} of {target.dtype}"
            )
        move(target, message)
        _synchronize([call])


def _signature(calls: Sequence[Call]) -> str:
    return " + ".join(call.signature() for call in calls)


def _synchronize(calls: Sequence[Call]) -> None:
    # Ranks run on streams of their own, and copies between them on whichever rank came last.
    for call in calls:
        for tensor in call.tensors():
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()


def _all_gather(calls: Sequence[Call]) -> None:
    for source, call in enumerate(calls):
        for other in calls:
            move(as_slots(other.output)[source], as_tensor(call.input))


def _reduce_scatter(calls: Sequence[Call]) -> None:
    # All results before the first write: an output may be a piece of an input.
    results = [
        _reduced([as_slots(call.input)[rank] for call in calls], calls)
        for rank in range(len(calls))
    ]
    for call, result in zip(calls, results, strict=True):
        move(as_tensor(call.output), result)


def _all_reduce(calls: Sequence[Call]) -> None:
    result = _reduced([as_tensor(call.input) for call in calls], calls)
    for call in calls:
        move(as_tensor(call.output), result)


def _reduce(calls: Sequence[Call]) -> None:
    result = _reduced([as_tensor(call.input) for call in calls], calls)
    move(as_tensor(calls[calls[0].root].output), result)


def _broadcast(calls: Sequence[Call]) -> None:
    source = as_tensor(calls[calls[0].root].input)
    for call in calls:
        move(as_tensor(call.output), source)


def _gather(calls: Sequence[Call]) -> None:
    slots = as_slots(calls[calls[0].root].output)
    for source, call in enumerate(calls):
        move(slots[source], as_tensor(call.input))


def _scatter(calls: Sequence[Call]) -> None:
    slots = as_slots(calls[calls[0].root].input)
    for target, call in enumerate(calls):
        move(as_tensor(call.output), slots[target])


def _all_to_all(calls: Sequence[Call]) -> None:
    for target, call in enumerate(calls):
        for source, other in enumerate(calls):
            received, piece = as_slots(call.output)[source], as_slots(other.input)[target]
            if received.numel() != piece.numel() or received.dtype != piece.dtype:
                raise UsageError(
                    f"all_to_all: rank {source} sends {piece.numel()} of {piece.dtype} to rank "
                    f"{target}, which expects {received.numel()} of {received.dtype} from it"
                )
            move(received, piece)


def _barrier(calls: Sequence[Call]) -> None:
    """Nothing moves: that all ranks came is all there is to it."""


# Carry out the calls of a kind, one per rank in rank order.
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
