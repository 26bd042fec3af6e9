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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
"""About the bytes that a rank sends in a round: more leave the caches, fewer waste the start."""

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
            places = [*_places([*arriving[number], *leaving[number]], memory)]
            num_arriving = len(arriving[number])
            receives, sends = places[:num_arriving], places[num_arriving:]
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
        packets: list[_Packet] = []
        for peer, message in messages.items():
            cuts = cut(message, number, rounds)
            pieces = [piece for each in cuts for piece in _pieces(each, part_of(each.parcel))]
            if pieces:
                packets.append(_Packet(peer=peer, pieces=pieces, run=_one_run(pieces, device)))
        found.append(packets)
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
    pieces: Sequence[Tensor]
    run: Tensor | None

    @property
    def num_packed(self) -> int:
        """How many elements need memory to travel in."""
        return 0 if self.run is not None else sum(piece.numel() for piece in self.pieces)

    def pack(self, memory: Tensor) -> Tensor:
        """Put the elements into the memory in which they travel, and return it."""
        for piece, packed in self._packed_in(memory):
            packed.copy_(piece)
        return memory

    def unpack(self, memory: Tensor) -> None:
        """Take the elements out of the memory in which they travelled."""
        for piece, packed in self._packed_in(memory):
            piece.copy_(packed)

    def _packed_in(self, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each piece with its place in the memory; none where elements travel as they lie."""
        if self.run is None:
            packed = memory.split([piece.numel() for piece in self.pieces])
            for piece, part in zip(self.pieces, packed, strict=True):
                yield piece, part.view(piece.shape)


def _places(packets: Sequence[_Packet], memory: Tensor) -> Iterator[tuple[_Packet, Tensor]]:
    """Each packet of a round, and where it travels: its own memory, or the next free one."""
    end = 0
    for packet in packets:
        start, end = end, end + packet.num_packed
        yield packet, memory[start:end] if packet.run is None else packet.run


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
