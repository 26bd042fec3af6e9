"""Inputs go to the device that a replica was said to train on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shoal.errors import UsageError
from shoal.runtime.module_state import map_tensors

Device = int | torch.device


def device_of_inputs(
    home: torch.device, device_id: Device | None, device_ids: Sequence[Device] | None
) -> torch.device | None:
    """Where inputs are moved to, if anywhere: named as torch names it, and where parameters are."""
    if device_id is not None and not isinstance(device_id, (int, torch.device)):
        raise RuntimeError(
            f"Expected device_id to be int or torch.device, but got {type(device_id)}"
        )
    if device_ids is not None:
        if device_id is not None or len(device_ids) != 1:
            raise UsageError(
                f"a module trains on one device: expected device_id, or device_ids of one entry, "
                f"got device_id={device_id!r} and device_ids={list(device_ids)!r}"
            )
        device_id = device_ids[0]
    if device_id is None or device_id == torch.device("cpu") == home:
        return None
    device = torch.device(home.type, device_id) if isinstance(device_id, int) else device_id
    if home.type == "cpu" or device != home:
        raise UsageError(
            f"the module is on {home}, but its device is given as {device_id!r}; move the module "
            "there first, and give no device to a module on the CPU"
        )
    return device


def move_inputs(module: nn.Module, device: torch.device) -> None:
    """From now on, move whatever the module is called with to a device."""

    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    def before(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return map_tensors(to_device, args), map_tensors(to_device, kwargs)

    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
