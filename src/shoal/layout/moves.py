"""Moves: what has to be copied where to go from one packing to another.

Both packings hold the same parameters; layouts and world sizes may differ. Each rank can list what
it receives or what it sends on its own: it asks the other packing who holds a region, and never
walks the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.errors import UsageError
from shoal.layout.packing import Packing
from shoal.layout.piece import Stored
from shoal.layout.region import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Copy a region out of one stored region into another."""

    region: Region
    src: Stored
    dst: Stored

    def __post_init__(self) -> None:
        if not self.src.region.contains(self.region) or not self.dst.region.contains(self.region):
            raise UsageError(f"a copied region must be inside both its ends, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A copy of a region of parameter `index` from one rank's buffer to another's."""

    index: int
    src_rank: int
    dst_rank: int
    copy: Copy


def copies(sources: Sequence[Stored], targets: Sequence[Stored]) -> Iterator[Copy]:
    """What the stored regions have in common: of use where only one side is a packing."""
    for src in sources:
        for dst in targets:
            region = src.region.overlap(dst.region)
            if region is not None:
                yield Copy(region=region, src=src, dst=dst)


def moves_to(src: Packing, dst: Packing, dst_rank: int) -> Iterator[Move]:
    """Everything that a rank of `dst` receives, parameter by parameter."""
    _check_same_params(src, dst)
    for index in range(len(dst.params)):
        for target in stored_regions(dst, index, dst_rank):
            for src_rank in src.holders(index, target.region):
                for copy in copies(stored_regions(src, index, src_rank), [target]):
                    yield Move(index=index, src_rank=src_rank, dst_rank=dst_rank, copy=copy)


def moves_from(src: Packing, dst: Packing, src_rank: int) -> Iterator[Move]:
    """Everything that a rank of `src` sends, parameter by parameter."""
    _check_same_params(src, dst)
    for index in range(len(src.params)):
        for source in stored_regions(src, index, src_rank):
            for dst_rank in dst.holders(index, source.region):
                for copy in copies([source], stored_regions(dst, index, dst_rank)):
                    yield Move(index=index, src_rank=src_rank, dst_rank=dst_rank, copy=copy)


def stored_regions(packing: Packing, index: int, rank: int) -> tuple[Stored, ...]:
    """The regions of a parameter that a rank stores, each with its offset in the rank's buffer."""
    return packing.piece(index, rank).stored(packing.params[index].itemsize)


def _check_same_params(src: Packing, dst: Packing) -> None:
    for have, want in zip(src.params, dst.params, strict=False):
        if have != want:
            raise UsageError(f"moves need the same parameters on both sides: {have} is not {want}")
    if len(src.params) != len(dst.params):
        raise UsageError(
            "moves need the same parameters on both sides, got "
            f"{len(src.params)} and {len(dst.params)}"
        )
