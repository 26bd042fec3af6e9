"""Delivery: elements carried from where some ranks hold them to where others want them.

    have (Region, Tensor) ...          want (Region, Tensor) ...
        │ a message to each rank: sent from where it lies,      ▲ received where it belongs,
        └ or packed ──────────► rounds of `post` ──────────────┘ or unpacked

What lies in one run of memory travels straight from or to it; only the rest is packed. Messages are
cut into rounds, so that what is packed at any time stays small. How many rounds there are follows
from numbers that all ranks know, so nobody has to ask. Elements travel as bits: any dtype is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shoal.comm.post import carrier, post
from shoal.errors import UsageError
from shoal.layout.parcel import Holding, Message, Parcel, cut, incoming, outgoing
from shoal.tensor.packet import Packet, Part, Space, within

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


def deliver(
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
    device = carrier(group, device)
    with torch.no_grad():
        leaving = _packets(sent, lambda parcel: have[parcel.src], rounds, device)
        arriving = _packets(received, lambda parcel: want[parcel.dst], rounds, device)
        memory = _memory_for(leaving, arriving, device)
        for number in range(rounds):
            space = Space(memory)
            receives = [(packet, space.place(packet)) for packet in arriving[number]]
            sends = [(packet, space.place(packet)) for packet in leaving[number]]
            started = post(
                group,
                # Packed one by one, while those before are on their way.
                ((packet.peer, packet.pack(place)) for packet, place in sends),
                [(packet.peer, place) for packet, place in receives],
                device=device,
                reason=reason,
            )
            if number == 0:
                for parcel in own:
                    source = within(have[parcel.src], parcel.region)
                    within(want[parcel.dst], parcel.region).copy_(source)
            for pending in started:
                pending.wait()
            for packet, place in receives:
                packet.unpack(place)


def _packets(
    messages: Mapping[int, Message],
    part_of: Callable[[Parcel], Part],
    rounds: int,
    device: torch.device,
) -> list[list[Packet]]:
    """The packets of each round."""
    found: list[list[Packet]] = []
    for number in range(rounds):
        cuts = {peer: cut(message, number, rounds) for peer, message in messages.items()}
        found.append(
            [
                Packet.of(peer, [(each, part_of(each.parcel)) for each in own], device)
                for peer, own in cuts.items()
                if own
            ]
        )
    return found


def _memory_for(
    leaving: Sequence[Sequence[Packet]], arriving: Sequence[Sequence[Packet]], device: torch.device
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
