"""A placement: which ranks hold which elements of a tensor, and on which devices.

    Packed   the pieces of a layout: every rank computes every rank's
    Listed   shards from a list, with a rank and a device each, as torch's specs have it

Everything else (gathering, resharding, operations, checkpoints) asks the questions below, and does
not look which kind it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar, Self, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shoal._torch.sharded import RemoteDevice, ShardingSpec, ShardMetadata
from shoal.layout.region import Region


class Placement(ABC):
    """Where the elements of one tensor lie, as one rank of a group sees it: a value.

    Ranks count inside of the group. A gradient and optimizer state have the placement of their
    parameter. `replica` counts the groups that hold the same tensor (HSDP), so that one of them can
    speak for all.
    """

    __slots__ = ()

    shards_stand_alone: ClassVar[bool]
    """Whether each shard is a tensor in its own right, that autograd and generators see by itself.

    torch has it so; where it is false, shards are but the memory of the whole.
    """

    shape: tuple[int, ...]
    group: ProcessGroup
    rank: int
    replica: int
    is_pinned: bool
    """Whether local tensors are to be allocated in page-locked memory."""
    local_regions: tuple[tuple[Region, ...], ...]
    """For each local tensor of this rank its rectangles, one after another; no empty ones."""
    local_shapes: tuple[tuple[int, ...], ...]
    """The shape of each local tensor; where a rank holds nothing, there is one without elements."""
    _cut: object
    """Which elements each rank holds, in which local shapes: the same value on all ranks."""
    local_devices: tuple[torch.device, ...] | None
    """Where each local tensor lies; None where the placement does not say."""

    def __deepcopy__(self, memo: object) -> Self:
        return self  # a value; and process groups cannot be copied

    @property
    def regions(self) -> tuple[Region, ...]:
        """This rank's rectangles of the whole; none where it holds nothing."""
        return tuple(region for regions in self.local_regions for region in regions)

    @property
    def is_whole(self) -> bool:
        """Whether one rank holds all elements; the same answer on every rank."""
        return len(self.holders(Region.whole(self.shape))) <= 1

    @abstractmethod
    def regions_of(self, rank: int) -> tuple[Region, ...]:
        """The regions that a rank of the group holds; none of them is empty."""

    @abstractmethod
    def holders(self, region: Region) -> Sequence[int]:
        """The ranks that may hold an element of the region, in order; no other rank does."""

    def agrees(self, other: Placement) -> bool:
        """Whether every rank holds the same elements, in the same local shapes, by both.

        All ranks get the same answer, so an error that follows from it is raised on all.
        """
        return self is other or (
            type(self) is type(other)
            and self.group is other.group
            and self.shape == other.shape
            and self._cut == other._cut
        )

    @abstractmethod
    def shards(self, device: torch.device) -> list[ShardMetadata]:
        """All ranks' shards, as torch describes them; `device` is where this rank's tensor lies."""

    @abstractmethod
    def own_shards(self, device: torch.device) -> list[ShardMetadata]:
        """This rank's shards, as torch describes them."""

    @abstractmethod
    def spec(self, device: torch.device) -> ShardingSpec:
        """torch's spec for a tensor that is cut like this."""

    @abstractmethod
    def on(self, device: torch.device) -> Placement:
        """The same cut, on another type of device; on this rank, on that very device."""

    @abstractmethod
    def within(self, group: ProcessGroup) -> Self:
        """The same cut, over another group of the same ranks."""

    def without_group(self) -> dict[str, Any]:
        """The fields that make the same placement of another group."""
        names = [each.name for each in fields(cast(Any, self)) if each.init]
        return {name: getattr(self, name) for name in names if name not in ("group", "rank")}


def shard_metadata(
    region: Region, rank: int, device: torch.device, *, is_own: bool
) -> ShardMetadata:
    """The metadata of a region on a rank of the world, as torch describes shards."""
    # Which of its devices another rank uses is its own business.
    place = device if is_own else torch.device(device.type)
    return ShardMetadata([*region.offsets], [*region.sizes], RemoteDevice(f"rank:{rank}/{place}"))


def group_or_default(group: ProcessGroup | None) -> ProcessGroup:
    """The group itself, or that of all ranks."""
    if group is not None:
        return group
    if dist.group.WORLD is None:
        raise ValueError(
            "Default process group has not been initialized: call init_process_group first, or "
            "pass process_group"
        )
    return dist.group.WORLD


def preferred_device(group: ProcessGroup | None) -> torch.device:
    """The device whose tensors a group's backend takes: the current accelerator, or the CPU."""
    if not isinstance(group, ProcessGroup):
        return torch.device("cpu")
    types = [pair.split(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return torch.device("cpu") if "cpu" in types else _device_of(types[0])


def device_beside(shards: Sequence[ShardMetadata], group: ProcessGroup | None) -> torch.device:
    """The device of a local tensor on a rank that has no shard: of the type that the shards have.

    A group that serves both CPU and GPU does not say where the shards are; they do. The group
    decides where they differ, or where this process has no such device.
    """
    types = {shard.placement.device().type for shard in shards if shard.placement is not None}
    if len(types) == 1 and types <= {"cpu", "meta", _accelerator()}:
        return _device_of(types.pop())
    return preferred_device(group)


def shared_device(device: torch.device, *placements: Placement) -> torch.device:
    """A device of the type on which all shards of all ranks lie; the CPU where they differ.

    All ranks get the same type, also those that hold nothing. `device` is where this rank's tensor
    lies: a placement that does not say has it on the same type of device everywhere.
    """
    types: set[str] = set()
    for placement in placements:
        if placement.local_devices is None:
            types.add(device.type)
            continue
        places = (shard.placement for shard in placement.shards(device))
        types.update(place.device().type for place in places if place is not None)
    if types <= {device.type}:
        return device
    return _device_of(types.pop()) if len(types) == 1 else torch.device("cpu")


def _device_of(device_type: str) -> torch.device:
    """The device of a type that this process uses at present; no index where it has none."""
    if device_type != _accelerator():
        return torch.device(device_type)
    return torch.device(device_type, torch.accelerator.current_device_index())


def _accelerator() -> str | None:
    """The type of accelerator that this process has."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type
