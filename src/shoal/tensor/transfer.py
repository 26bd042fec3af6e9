"""Transfers: elements carried from where some ranks hold them to where others want them.

    have (Region, Tensor) ...          want (Region, Tensor) ...
        │ a message to each rank: sent from where it lies,      ▲ received where it belongs,
        └ or packed ──────────► rounds of messages ────────────┘ or unpacked

What lies in one run of memory travels straight from or to it; only the rest is packed. Messages are
cut into rounds, so that what is packed at any time stays small. How many rounds there are follows
from numbers that all ranks know, so nobody has to ask. Elements travel as bits: any dtype is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shoal.comm.messages import carrier_device, send_messages
from shoal.errors import UsageError
from shoal.layout.parcel import Cut, Holding, Message, Parcel, cut, incoming, outgoing
from shoal.layout.region import Region, flat_regions

Part: TypeAlias = tuple[Region, Tensor]
"""A region, and memory for its elements in the region's shape."""

MAX_EXTRA = 2.0
"""The memory that a reshard may need at its peak: so many times the larger local shard.

The new local shard counts, so that 1.0 of it is spent already.
"""

ONE_ROUND_BYTES = 1 << 20
"""A tensor of this size or less goes in one round: there time is worth more than memory."""

ROUND_BYTES = 32 << 20
"""What a rank sends in a round, about: more does not fit in caches, less does not pay its start."""

# By itemsize: every dtype of that size is copied as this one, which all devices can copy.
_BITS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}


def num_rounds(
    total_bytes: int, num_ranks: int, *, max_extra: float = MAX_EXTRA, num_copies: int = 1
) -> int:
    """How many rounds keep the peak below `max_extra` local shards, on whichever rank.

    A rank packs at most all that it sends (its shard, to `num_copies` ranks) and all that it
    receives. In each of n rounds that is (num_copies + 1) / n of the larger of both.
    """
    if not max_extra > 1:
        raise UsageError(
            f"expected max_extra over 1.0, since the new local shard is 1.0 of it, got {max_extra}"
        )
    if total_bytes <= ONE_ROUND_BYTES:
        return 1
    for_memory = math.ceil((num_copies + 1) / (max_extra - 1))
    for_speed = math.ceil(total_bytes / (num_ranks * ROUND_BYTES))
    return max(for_memory, for_speed)


def transfer(
    have: Sequence[Part],
    want: Sequence[Part],
    src: Holding,
    dst: Holding,
    group: ProcessGroup,
    *,
    device: torch.device,
    rounds: int,
    reason: str,
) -> None:
    """Fill what this rank wants with what all ranks have: collective.

    `have` and `want` are this rank's regions of the two holdings, in their order. `device` is where
    the tensor lies; its type, like `rounds`, must be the same on all ranks.
    """
    rank = group.rank()
    have = [(region, _bits(tensor)) for region, tensor in have]
    want = [(region, _bits(tensor)) for region, tensor in want]
    sent, received = outgoing(src, dst, rank), incoming(src, dst, rank)
    own = sent.pop(rank, ())
    received.pop(rank, None)
    device = carrier_device(group, device)
    with torch.no_grad():
        leaving = _packets(sent, lambda parcel: have[parcel.src], rounds, device)
        arriving = _packets(received, lambda parcel: want[parcel.dst], rounds, device)
        memory = _memory_for(leaving, arriving, device)
        for number in range(rounds):
            space = _Space(memory)
            receives = [(packet, space.place(packet)) for packet in arriving[number]]
            sends = [(packet, space.place(packet)) for packet in leaving[number]]
            started = send_messages(
                group,
                # Packed one by one, while those before are on their way.
                ((packet.peer, packet.pack(place)) for packet, place in sends),
                [(packet.peer, place) for packet, place in receives],
                device=device,
                reason=reason,
            )
            if number == 0:
                for parcel in own:
                    source = _within(have[parcel.src], parcel.region)
                    _within(want[parcel.dst], parcel.region).copy_(source)
            for pending in started:
                pending.wait()
            for packet, place in receives:
                packet.unpack(place)


def _packets(
    messages: Mapping[int, Message],
    part_of: Callable[[Parcel], Part],
    rounds: int,
    device: torch.device,
) -> list[list[_Packet]]:
    """The packets of each round."""
    found: list[list[_Packet]] = []
    for number in range(rounds):
        cuts = {peer: cut(message, number, rounds) for peer, message in messages.items()}
        found.append(
            [
                _Packet.of(peer, [(each, part_of(each.parcel)) for each in own], device)
                for peer, own in cuts.items()
                if own
            ]
        )
    return found


def _memory_for(
    leaving: Sequence[Sequence[_Packet]],
    arriving: Sequence[Sequence[_Packet]],
    device: torch.device,
) -> Tensor:
    """Memory for what is packed in any one round."""
    rounds = [[*sends, *receives] for sends, receives in zip(leaving, arriving, strict=True)]
    numel = max(sum(packet.num_packed for packet in packets) for packets in rounds)
    dtype = next((p.pieces[0].dtype for packets in rounds for p in packets), torch.uint8)
    return torch.empty(numel, dtype=dtype, device=device)


def _bits(tensor: Tensor) -> Tensor:
    """View a tensor's elements as plain numbers of their size."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.view(_BITS[tensor.element_size()])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Packet:
    """Views of the elements, in the order in which they travel.

    `run` is one flat view of all of them, where they follow one another in memory that can travel
    as it is; else they have to be packed.
    """

    peer: int
    pieces: tuple[Tensor, ...]
    run: Tensor | None

    @classmethod
    def of(cls, peer: int, ends: Sequence[tuple[Cut, Part]], device: torch.device) -> _Packet:
        """Find the elements of cuts, each in the part that has it on this rank."""
        pieces = tuple(piece for cut, part in ends for piece in _pieces(cut, part))
        return cls(peer=peer, pieces=pieces, run=_one_run(pieces, device))

    @property
    def num_packed(self) -> int:
        """How many elements need memory to travel in."""
        return 0 if self.run is not None else sum(piece.numel() for piece in self.pieces)

    def pack(self, memory: Tensor) -> Tensor:
        """Put the elements into the memory in which they travel, and return it."""
        if self.run is None:
            self._copy(memory, into_memory=True)
        return memory

    def unpack(self, memory: Tensor) -> None:
        """Take the elements out of the memory in which they travelled."""
        if self.run is None:
            self._copy(memory, into_memory=False)

    def _copy(self, memory: Tensor, *, into_memory: bool) -> None:
        start = 0
        for piece in self.pieces:
            stop = start + piece.numel()
            packed = memory[start:stop].view(piece.shape)
            target, source = (packed, piece) if into_memory else (piece, packed)
            target.copy_(source)
            start = stop


class _Space:
    """Memory for the packets of one round, dealt out from its start."""

    __slots__ = ("_end", "_memory")

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._end = 0

    def place(self, packet: _Packet) -> Tensor:
        """Where a packet travels: its own memory, or the next free one."""
        if packet.run is not None:
            return packet.run
        start, self._end = self._end, self._end + packet.num_packed
        return self._memory[start : self._end]


def _within(part: Part, region: Region) -> Tensor:
    """View a region that lies inside a part."""
    outer, tensor = part
    return tensor[region.relative_to(outer).slices]


def _pieces(cut: Cut, part: Part) -> list[Tensor]:
    region = cut.parcel.region
    view = _within(part, region)
    if cut.stop - cut.start == region.numel:
        return [view]
    if view.is_contiguous():
        return [view.view(-1)[cut.start : cut.stop]]
    return [view[each.slices] for each in flat_regions(region.sizes, cut.start, cut.stop)]


def _one_run(pieces: Sequence[Tensor], device: torch.device) -> Tensor | None:
    """View pieces as one, where each begins at the end of the one before."""
    first, numel = pieces[0], 0
    for piece in pieces:
        if (
            piece.device != device
            or not piece.is_contiguous()
            or piece.data_ptr() != first.data_ptr() + numel * first.element_size()
            or piece.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        ):
            return None
        numel += piece.numel()
    return first.as_strided((numel,), (1,))
