"""The device of tensors that a process group communicates, where no tensor of this rank says it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shoal._torch.sharded import ShardMetadata

if TYPE_CHECKING:
    from shoal.tensor.placement import Placement


def preferred_device(group: ProcessGroup | None) -> torch.device:
    """Where a group's backend takes tensors from: the current accelerator, or the CPU."""
    if not isinstance(group, ProcessGroup):
        return torch.device("cpu")
    types = [pair.split(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return torch.device("cpu") if "cpu" in types else _device_of(types[0])


def device_beside(shards: Sequence[ShardMetadata], group: ProcessGroup | None) -> torch.device:
    """Where a rank has its local tensor that is none of the shards: on their type of device.

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
