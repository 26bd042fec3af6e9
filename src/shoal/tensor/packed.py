"""Placements of tensors that a layout has cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Self

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shoal._torch.sharded import ShardingSpec, ShardMetadata
from shoal.errors import MeshError, UsageError
from shoal.layout.packing import Packing
from shoal.layout.piece import Piece
from shoal.layout.region import Region
from shoal.tensor.placement import Placement, shard_metadata
from shoal.tensor.spec import spec_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed(Placement):
    """Parameter `index` of a packing, as rank `rank` of `group` sees it.

    The tensor's dtype need not be the one that the packing was made for: cuts count elements.
    """

    shards_stand_alone: ClassVar[bool] = False
    local_devices: ClassVar[None] = None  # pyright: ignore

    packing: Packing
    index: int
    group: ProcessGroup
    rank: int
    replica: int = 0
    is_pinned: bool = field(default=False, init=False, repr=False, compare=False)
    shape: tuple[int, ...] = field(init=False, repr=False, compare=False)
    piece: Piece = field(init=False, repr=False, compare=False)
    local_regions: tuple[tuple[Region, ...], ...] = field(init=False, repr=False, compare=False)
    local_shapes: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _cut: object = field(init=False, repr=False, compare=False)

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
        piece = self.packing.piece(self.index, self.rank)
        set_field = partial(object.__setattr__, self)
        set_field("shape", self.packing.params[self.index].shape)
        set_field("piece", piece)
        set_field("local_regions", (piece.regions,))
        set_field("local_shapes", (piece.shape,))
        set_field("_cut", _cut(self.packing, self.index))

    def regions_of(self, rank: int) -> tuple[Region, ...]:
        """See `Placement.regions_of`."""
        return self.packing.piece(self.index, rank).regions

    def holders(self, region: Region) -> Sequence[int]:
        """See `Placement.holders`."""
        return self.packing.holders(self.index, region)

    def shards(self, device: torch.device) -> list[ShardMetadata]:
        """See `Placement.shards`; walks all ranks of the group."""
        return [shard for rank in range(self.group.size()) for shard in self._of(rank, device)]

    def own_shards(self, device: torch.device) -> list[ShardMetadata]:
        """See `Placement.own_shards`."""
        return self._of(self.rank, device)

    def spec(self, device: torch.device) -> ShardingSpec:
        """See `Placement.spec`."""
        return spec_of(self.shards(device))

    def on(self, device: torch.device) -> Packed:
        """See `Placement.on`: a packing has no device."""
        return self

    def within(self, group: ProcessGroup) -> Self:
        """See `Placement.within`."""
        return replace(self, group=group, rank=group.rank())

    def _of(self, rank: int, device: torch.device) -> list[ShardMetadata]:
        regions = self.regions_of(rank)
        if rank == 0 and not math.prod(self.shape):
            # torch has a shard for each tensor, also for one without elements.
            regions = (Region.whole(self.shape),)
        of_world, is_own = dist.get_global_rank(self.group, rank), rank == self.rank
        return [shard_metadata(region, of_world, device, is_own=is_own) for region in regions]

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of {self.packing.world_size} holding "
            f"{self.piece.numel:,} elements of {self.shape} by {type(self.packing).__name__}"
        )


def packed(group: ProcessGroup, *, packing: Packing, index: int, replica: int) -> Packed:
    """A placement of the fields that `without_group` gives."""
    return Packed(packing=packing, index=index, group=group, rank=group.rank(), replica=replica)


def _cut(packing: Packing, index: int) -> object:
    """See `Placement`: stripes, of which there are few, and how a holder shapes its piece."""
    stripes = packing.stripes(index)
    first_rank = stripes[0].first_rank if stripes else 0
    return (
        packing.piece(index, first_rank).shape,
        *((s.first_rank, s.num_ranks, s.full_offset, s.numel, s.num_bands) for s in stripes),
    )
