"""Parcels: the regions that ranks send one another to go from one holding to another.

    holding A, two ranks         holding B, three ranks       rank 0 of A sends
    rank 0  rows 0-2             rank 0  rows 0-1             to rank 0: rows 0-1
    rank 1  rows 3-5             rank 1  rows 2-3             to rank 1: row 2
                                 rank 2  rows 4-5

A rank lists its own parcels alone. It asks the other holding who holds a region, and never walks
the ranks. All parcels of a pair of ranks are one message, of which both ends know the order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from shoal.errors import UsageError
from shoal.layout.region import Region


class Holding(Protocol):
    """An answer to which ranks hold which regions of one tensor."""

    def regions_of(self, rank: int) -> Sequence[Region]:
        """The regions that a rank holds; none of them is empty."""
        ...

    def holders(self, region: Region) -> Sequence[int]:
        """The ranks that may hold an element of a region; no other rank does."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """A region that goes from a rank's `src`-th region to another's `dst`-th."""

    region: Region
    src: int
    dst: int


Message: TypeAlias = tuple[Parcel, ...]
"""All parcels from one rank to another, in the order of the sender's regions."""


def outgoing(src: Holding, dst: Holding, rank: int) -> dict[int, Message]:
    """The messages that a rank sends, by receiver."""
    return _messages(
        src, dst, rank, lambda region, own, other: Parcel(region=region, src=own, dst=other)
    )


def incoming(src: Holding, dst: Holding, rank: int) -> dict[int, Message]:
    """The messages that a rank receives, by sender."""
    return _messages(
        dst, src, rank, lambda region, own, other: Parcel(region=region, src=other, dst=own)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Elements [start, stop) of a parcel's region, counted row by row."""

    parcel: Parcel
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= self.parcel.region.numel:
            raise UsageError(
                f"elements [{self.start}, {self.stop}) are not a part of {self.parcel.region}"
            )


def cut(message: Message, index: int, num_cuts: int) -> list[Cut]:
    """The `index`-th of `num_cuts` parts of a message; their sizes differ by an element at most."""
    if not 0 <= index < num_cuts:
        raise UsageError(f"part {index} does not exist: the message is cut into {num_cuts}")
    numel = sum(parcel.region.numel for parcel in message)
    begin, end = index * numel // num_cuts, (index + 1) * numel // num_cuts
    cuts: list[Cut] = []
    offset = 0
    for parcel in message:
        start = max(begin - offset, 0)
        stop = min(end - offset, parcel.region.numel)
        if start < stop:
            cuts.append(Cut(parcel=parcel, start=start, stop=stop))
        offset += parcel.region.numel
    return cuts


def _messages(
    own: Holding, other: Holding, rank: int, parcel_of: Callable[[Region, int, int], Parcel]
) -> dict[int, Message]:
    """The parcels between a rank's regions in one holding and its peers' in the other, by peer."""
    found: dict[int, list[Parcel]] = {}
    for index, region in enumerate(own.regions_of(rank)):
        for peer in other.holders(region):
            parcels = found.setdefault(peer, [])
            for at_peer, held in enumerate(other.regions_of(peer)):
                overlap = region.overlap(held)
                if overlap is not None:
                    parcels.append(parcel_of(overlap, index, at_peer))
    return {
        peer: tuple(sorted(parcels, key=lambda parcel: (parcel.src, parcel.dst)))
        for peer, parcels in found.items()
        if parcels
    }
