"""Placements of tensors whose shards are listed one by one, as torch's specs and metadata do."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shoal._torch import sharded
from shoal._torch.sharded import ShardingSpec, ShardMetadata, TensorProperties
from shoal.layout.listing import Listing
from shoal.layout.region import Region
from shoal.tensor.placement import Placement, device_beside
from shoal.tensor.spec import spec_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed(Placement):
    """Shards with a global rank and a device each; a rank's own in the order of its local tensors.

    A rank that is not in the group may have one too, and holds nothing by it. Without any group
    (None), `own` says which shards are here.
    """

    shards_stand_alone: ClassVar[bool] = True

    listed: tuple[ShardMetadata, ...] = field(repr=False, compare=False)
    shape: tuple[int, ...]
    group: ProcessGroup
    given_spec: ShardingSpec | None = field(default=None, repr=False, compare=False)
    is_pinned: bool = field(default=False, repr=False, compare=False)
    own: tuple[int, ...] | None = field(default=None, repr=False, compare=False)
    rank: int = field(init=False, compare=False)
    replica: int = field(default=0, repr=False, compare=False)
    local_devices: tuple[torch.device, ...] = field(  # pyright: ignore
        init=False, repr=False, compare=False
    )
    local_regions: tuple[tuple[Region, ...], ...] = field(init=False, repr=False, compare=False)
    local_shapes: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _cut: object = field(init=False, repr=False)
    _listing: Listing = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        set_field = partial(object.__setattr__, self)
        if self.group is None:
            ranks = [_torch_rank(shard) for shard in self.listed]
            own = self.own or ()
            set_field("rank", -1)
        else:
            global_ranks = [_rank_in(self.group, shard) for shard in self.listed]
            own = tuple(i for i, rank in enumerate(global_ranks) if rank == dist.get_rank())
            ranks = _inside(self.group, global_ranks)
            set_field("rank", dist.get_rank(self.group))
            set_field("own", own)
        regions = [_region(shard) for shard in self.listed]
        # Stable: the order of a rank's own shards is part of the cut, that of ranks is not.
        held = sorted(zip(ranks, regions, strict=True), key=lambda pair: pair[0])
        set_field("shape", tuple(self.shape))
        set_field("given_spec", self.given_spec or spec_of([*self.listed]))
        set_field("_cut", tuple(held))
        set_field("_listing", Listing(held))
        set_field("local_regions", tuple(_if_any(regions[i]) for i in own) or ((),))
        set_field("local_shapes", tuple(regions[i].sizes for i in own) or ((0,),))
        set_field("local_devices", self._devices(own))

    @classmethod
    def of_spec(
        cls,
        spec: ShardingSpec,
        shape: Sequence[int],
        group: ProcessGroup,
        *,
        is_pinned: bool = False,
    ) -> Self:
        """List the shards into which a spec cuts a tensor; raises if it cannot."""
        shards = spec.build_metadata(torch.Size(shape), TensorProperties()).shards_metadata
        if not isinstance(spec, (sharded.ChunkShardingSpec, sharded.EnumerableShardingSpec)):
            check_shards(shards, shape)
        return cls(
            listed=tuple(shards),
            shape=tuple(shape),
            group=group,
            given_spec=spec,
            is_pinned=is_pinned,
        )

    def regions_of(self, rank: int) -> tuple[Region, ...]:
        """See `Placement.regions_of`."""
        return self._listing.regions_of(rank)

    def holders(self, region: Region) -> Sequence[int]:
        """See `Placement.holders`."""
        return self._listing.holders(region)

    def shards(self, device: torch.device) -> list[ShardMetadata]:
        """See `Placement.shards`: in the order in which the spec lists them."""
        spec = self.given_spec
        if not isinstance(spec, sharded.ChunkShardingSpec):
            return [*self.listed]
        dim = cast(int, spec.dim)
        return sorted(self.listed, key=lambda shard: shard.shard_offsets[dim])

    def own_shards(self, device: torch.device) -> list[ShardMetadata]:
        """See `Placement.own_shards`."""
        return [self.listed[index] for index in self.own or ()]

    def spec(self, device: torch.device) -> ShardingSpec:
        """See `Placement.spec`: the one given, or one that cuts as the shards are."""
        return cast(ShardingSpec, self.given_spec)

    def on(self, device: torch.device) -> Listed:
        """See `Placement.on`; which device of the same type another rank uses is its business."""
        own = self.own or ()
        moved = tuple(
            _on_device(shard, device, exactly=index in own)
            for index, shard in enumerate(self.listed)
        )
        if all(old is new for old, new in zip(self.listed, moved, strict=True)):
            return self
        return replace(self, listed=moved, given_spec=None, is_pinned=False)

    def within(self, group: ProcessGroup) -> Self:
        """See `Placement.within`."""
        return replace(self, group=group)

    def _devices(self, own: Sequence[int]) -> tuple[torch.device, ...]:
        found = tuple(_place(self.listed[index]).device() for index in own)
        return found or (device_beside(self.listed, self.group),)

    def __str__(self) -> str:
        size = dist.get_world_size(self.group) if self.rank >= 0 else "no group"
        numel = sum(region.numel for region in self.regions)
        spec = type(self.given_spec).__name__
        if isinstance(self.given_spec, sharded.ChunkShardingSpec):
            spec += f"(dim={self.given_spec.dim})"
        return f"rank {self.rank} of {size} holding {numel:,} elements of {self.shape} by {spec}"


def check_shards(shards: Sequence[ShardMetadata], shape: Sequence[int]) -> None:
    """Raise ValueError unless the shards cover a tensor, and no element twice."""
    if not shards:
        raise ValueError("shards_metadata must not be empty: list the shards of all ranks")
    sharded.validate_non_overlapping_shards_metadata([*shards])
    sharded.check_tensor([*shards], [*shape])


def listed(group: ProcessGroup, **fields: Any) -> Listed:
    """A placement of the fields that `without_group` gives; raises unless they fit together."""
    shards, shape, spec = fields["listed"], fields["shape"], fields["given_spec"]
    check_shards(shards, shape)
    if isinstance(spec, sharded.ChunkShardingSpec):
        dim = cast(int, spec.dim)
        if not -len(shape) <= dim < len(shape):
            raise ValueError(f"a tensor of shape {shape} has no dim {dim} to be cut along")
    return Listed(group=group, **fields)


def _region(shard: ShardMetadata) -> Region:
    return Region(offsets=tuple(shard.shard_offsets), sizes=tuple(shard.shard_sizes))


def _if_any(region: Region) -> tuple[Region, ...]:
    return (region,) if region.numel else ()


def _place(shard: ShardMetadata) -> sharded.RemoteDevice:
    if shard.placement is None:
        raise ValueError(
            f"remote device is None for {shard}: give the shard a placement such as 'rank:0/cpu'"
        )
    return shard.placement


def _torch_rank(shard: ShardMetadata) -> int:
    rank = _place(shard).rank()
    return -1 if rank is None else rank


def _rank_in(group: ProcessGroup, shard: ShardMetadata) -> int:
    rank, _ = sharded.parse_remote_device(group, _place(shard))
    if rank is None:
        raise ValueError(
            f"the placement of {shard} names no rank: expected 'rank:<rank>/<device>', or "
            "'<worker>/<device>' of RPC"
        )
    return rank


def _inside(group: ProcessGroup, global_ranks: Sequence[int]) -> Sequence[int]:
    """The ranks as the group counts them; a rank outside of it does not know, and need not."""
    if not isinstance(group, ProcessGroup):
        return global_ranks
    number = {rank: index for index, rank in enumerate(dist.get_process_group_ranks(group))}
    return [number[rank] for rank in global_ranks]


def _on_device(shard: ShardMetadata, device: torch.device, *, exactly: bool) -> ShardMetadata:
    present = _place(shard).device()
    if present == device if exactly else present.type == device.type:
        return shard
    moved = deepcopy(shard)
    moved.placement = sharded.on_device(_place(shard), device)
    return moved
