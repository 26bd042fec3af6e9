"""The device of tensors that a process group communicates, where no tensor of this rank says it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from shoal.tensor.placement import Placement


def preferred_device(group: ProcessGroup | None) -> torch.device:
    """Where a group's backend takes tensors from: the current accelerator, or the CPU."""
    if not isinstance(group, ProcessGroup):
        return torch.device("cpu")
    devices = [pair.split(":")[0] for pair in dist.get_backend_config(group).split(",")]
    if "cpu" in devices:
        return torch.device("cpu")
    return torch.device(devices[0], torch.accelerator.current_device_index())


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
    if len(types) == 1 and types != {"cpu"}:
        return torch.device(types.pop(), torch.accelerator.current_device_index())
    return torch.device("cpu")
