"""A packet: what goes to, or comes from, one rank in one round; and where its elements lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from shoal.layout.parcel import Cut
from shoal.layout.region import Region, flat_regions

Part: TypeAlias = tuple[Region, Tensor]
"""A region, and memory for its elements in the region's shape."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packet:
    """Views of the elements, in the order in which they travel.

    `run` is one flat view of all of them, where they follow one another in memory that can travel
    as it is; else they have to be packed.
    """

    peer: int
    pieces: tuple[Tensor, ...]
    run: Tensor | None

    @classmethod
    def of(cls, peer: int, ends: Sequence[tuple[Cut, Part]], device: torch.device) -> Packet:
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


class Space:
    """Memory for the packets of one round, dealt out from its start."""

    __slots__ = ("_end", "_memory")

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._end = 0

    def place(self, packet: Packet) -> Tensor:
        """Where a packet travels: its own memory, or the next free one."""
        if packet.run is not None:
            return packet.run
        start, self._end = self._end, self._end + packet.num_packed
        return self._memory[start : self._end]


def within(part: Part, region: Region) -> Tensor:
    """View a region that lies inside a part."""
    outer, tensor = part
    return tensor[region.relative_to(outer).slices]


def _pieces(cut: Cut, part: Part) -> list[Tensor]:
    region = cut.parcel.region
    view = within(part, region)
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
