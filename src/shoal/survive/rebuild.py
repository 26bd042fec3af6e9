"""From a kept version on the ranks that are left to the shards of other ranks.

    images and parities      ──►  lost images, whole,     ──►  new shards of
    of those who are left         on one rank each             the new ranks

Bytes that are lost are made where a parity of them lies, brought together on one rank for each lost
one, and then everything goes from where it is to where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shoal.comm.transport import Transport
from shoal.layout.buffer import region_views
from shoal.layout.packing import Packing
from shoal.layout.region import Region
from shoal.survive.parity import ParityRows, RowPiece
from shoal.survive.protection import CHUNK_BYTES, KeptVersion
from shoal.survive.state import ImageLayout
from shoal.tensor.transfer import Part, num_rounds, transfer


@dataclass(frozen=True)
class Succession:
    """Which new rank has the shards of which old ranks: its own, or those of lost ones."""

    old: tuple[int, ...]
    """The members of the generation that is rebuilt, by rank."""
    new: tuple[int, ...]
    """Those that go on, by their new ranks; some may have joined."""

    @cached_property
    def lost(self) -> tuple[int, ...]:
        """The old ranks that are not there any more."""
        return tuple(rank for rank, member in enumerate(self.old) if member not in self.new)

    @cached_property
    def left(self) -> dict[int, int]:
        """For each old rank that is there still, its new one."""
        return {
            rank: self.new.index(member)
            for rank, member in enumerate(self.old)
            if member in self.new
        }

    @cached_property
    def heirs(self) -> dict[int, int]:
        """For each old rank the new one that has its image: of lost ones, one after another."""
        left = list(self.left.values())
        heirs = {rank: left[number % len(left)] for number, rank in enumerate(self.lost)}
        return {**self.left, **heirs}

    def old_of(self, new_rank: int) -> list[int]:
        """The old ranks whose images a new rank has, its own first."""
        found = [old for old, new in self.heirs.items() if new == new_rank]
        return sorted(found, key=lambda old: (old in self.lost, old))


@dataclass(frozen=True, slots=True, kw_only=True)
class InheritedHolding:
    """Who holds which elements of a parameter, when images of old ranks lie on new ones."""

    packing: Packing
    index: int
    succession: Succession

    def regions_of(self, rank: int) -> Sequence[Region]:
        """The regions of all images that a new rank has, in order."""
        return [
            region
            for old in self.succession.old_of(rank)
            for region in self.packing.piece(self.index, old).regions
        ]

    def holders(self, region: Region) -> Sequence[int]:
        """The new ranks that may hold an element of a region."""
        heirs = self.succession.heirs
        return sorted({heirs[old] for old in self.packing.holders(self.index, region)})


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedHolding:
    """Who holds which elements of a parameter of a packing."""

    packing: Packing
    index: int

    def regions_of(self, rank: int) -> Sequence[Region]:
        """The regions of a rank."""
        return self.packing.piece(self.index, rank).regions

    def holders(self, region: Region) -> Sequence[int]:
        """The ranks that may hold an element of a region."""
        return self.packing.holders(self.index, region)


def rebuild_images(
    kept: KeptVersion | None,
    rows: ParityRows | None,
    succession: Succession,
    transport: Transport,
    device: torch.device,
) -> dict[int, Tensor]:
    """This rank's images, by old rank: its own, and those it inherits. Collective.

    `kept` is None on a rank that has joined.
    """
    images: dict[int, Tensor] = {}
    own = next((old for old, new in succession.left.items() if new == transport.rank), None)
    if kept is not None:
        assert own is not None
        images[own] = kept.image.to(device)
    lost, left = succession.lost, succession.left
    if not lost:
        return images
    assert rows is not None
    affected = [row for row in range(rows.num_members) if rows.needed(row, lost)]
    needed = [
        (left[piece.member], left[rows.mender(row, lost)], piece)
        for row in affected
        for piece in rows.needed(row, lost)
    ]
    moves = [
        (left[rows.mender(row, lost)], succession.heirs[piece.member], piece)
        for row in affected
        for piece in rows.lost_in(row, lost)
    ]
    for old in lost:
        if succession.heirs[old] == transport.rank:
            images[old] = torch.zeros(rows.padded_bytes, dtype=torch.uint8, device=device)
    # A part of each stripe after another: all at once would be as large as several images.
    for start in range(0, rows.stripe_bytes, CHUNK_BYTES):
        part = slice(start, min(start + CHUNK_BYTES, rows.stripe_bytes))

        def read(piece: RowPiece, part: slice = part) -> Tensor:
            assert kept is not None
            return (kept.image if piece.parity is None else kept.parity)[rows.span(piece)][part]

        arrived = _send(needed, read, part, transport, device, "stripes to mend")
        mended: dict[RowPiece, Tensor] = {}
        for row in affected:
            if left[rows.mender(row, lost)] == transport.rank:
                pieces = {piece: arrived[piece] for piece in rows.needed(row, lost)}
                mended.update(rows.mend(row, lost, pieces))
        found = _send(moves, mended.__getitem__, part, transport, device, "mended stripes")
        for piece, stripe in found.items():
            images[piece.member][rows.span(piece)][part] = stripe
    return images


def _send(
    moves: Sequence[tuple[int, int, RowPiece]],
    read: Callable[[RowPiece], Tensor],
    part: slice,
    transport: Transport,
    device: torch.device,
    reason: str,
) -> dict[RowPiece, Tensor]:
    """Carry a part of pieces from rank to rank; returns those that are here then."""
    num_bytes = part.stop - part.start
    rank, peers = transport.rank, range(transport.size)
    sent = [[p for s, r, p in moves if s == rank and r == peer] for peer in peers]
    received = [[p for s, r, p in moves if r == rank and s == peer] for peer in peers]
    pieces = [read(piece) for to in sent for piece in to]
    leaving = torch.cat([torch.empty(0, dtype=torch.uint8), *[p.cpu() for p in pieces]]).to(device)
    arriving = torch.empty(num_bytes * sum(map(len, received)), dtype=torch.uint8, device=device)
    transport.all_to_all(
        arriving,
        leaving,
        [num_bytes * len(pieces) for pieces in received],
        [num_bytes * len(pieces) for pieces in sent],
        reason=f"rebuilding: {reason}",
    ).wait()
    order = [piece for pieces in received for piece in pieces]
    return dict(zip(order, arriving.split(num_bytes), strict=True)) if order else {}


def reshard(
    images: dict[int, Tensor],
    layout: ImageLayout,
    succession: Succession,
    new_packings: Sequence[Packing],
    new_locals: Sequence[Tensor],
    transport: Transport,
) -> None:
    """Fill the new local tensors with what lies in images. Collective."""
    olds = succession.old_of(transport.rank)
    views = {old: layout.locals_in(images[old], old) for old in olds}
    for number, (part, local) in enumerate(zip(layout.parts, new_locals, strict=True)):
        packing, target = layout.packings[part.unit], new_packings[part.unit]
        have: list[Part] = [
            found
            for old in olds
            for found in region_views(views[old][number], packing.piece(part.member, old).regions)
        ]
        regions = target.piece(part.member, transport.rank).regions
        numel = packing.params[part.member].numel
        transfer(
            have,
            region_views(local, regions),
            InheritedHolding(packing=packing, index=part.member, succession=succession),
            PackedHolding(packing=target, index=part.member),
            transport.group,
            device=local.device,
            rounds=num_rounds(numel * part.dtype.itemsize, transport.size),
            reason="resharding to other ranks",
        )
