"""A placement: which elements of a tensor this rank holds, and who holds the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from torch.distributed import ProcessGroup

from shoal.errors import MeshError, UsageError
from shoal.layout.packing import Packing
from shoal.layout.piece import Piece
from shoal.layout.region import Region

Cut: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Parameter `index` of a packing, as rank `rank` of `group` sees it.

    A gradient and optimizer state have the placement of their parameter. Their dtype need not be
    the one that the packing was made for: cuts count elements, not bytes. `replica` counts the
    groups that hold the same tensor (HSDP), so that one of them can speak for all.
    """

    packing: Packing
    index: int
    group: ProcessGroup
    rank: int
    replica: int = 0
    shape: tuple[int, ...] = field(init=False, repr=False, compare=False)
    piece: Piece = field(init=False, repr=False, compare=False)
    _cut: Cut = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.group, ProcessGroup):
            raise MeshError(
                f"expected a process group that this rank belongs to, got {self.group!r}"
            )
        if self.group.size() != self.packing.world_size:
            raise MeshError(
                f"a packing for {self.packing.world_size} ranks cannot be placed on a group of "
                f"{self.group.size()}: pack for the group's size"
            )
        if self.rank != self.group.rank():
            raise MeshError(f"expected rank {self.group.rank()} of the group, got {self.rank}")
        if not 0 <= self.index < len(self.packing.params):
            raise UsageError(
                f"parameter {self.index} does not exist: the packing has {len(self.packing.params)}"
            )
        if self.replica < 0:
            raise UsageError(f"expected a replica of 0 or more, got {self.replica}")
        object.__setattr__(self, "shape", self.packing.params[self.index].shape)
        object.__setattr__(self, "piece", self.packing.piece(self.index, self.rank))
        object.__setattr__(self, "_cut", _cut(self.packing, self.index))

    @property
    def is_whole(self) -> bool:
        """Whether one rank holds all elements; the same answer on every rank."""
        return len(self.packing.holders(self.index, Region.whole(self.shape))) <= 1

    def agrees(self, other: Placement) -> bool:
        """Whether every rank holds the same elements, in the same local shape, by both.

        All ranks get the same answer, so an error that follows from it is raised on all.
        """
        if self is other:
            return True
        return self.group is other.group and self.shape == other.shape and self._cut == other._cut

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of {self.packing.world_size} holding "
            f"{self.piece.numel:,} elements of {self.shape}"
        )


def _cut(packing: Packing, index: int) -> Cut:
    """Who holds what, without where it lies in the shards; and how a holder shapes it."""
    stripes = packing.stripes(index)
    first_rank = stripes[0].first_rank if stripes else 0
    return (
        packing.piece(index, first_rank).shape,
        *((s.first_rank, s.num_ranks, s.full_offset, s.numel, s.num_bands) for s in stripes),
    )
