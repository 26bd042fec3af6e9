"""Full parameters for as long as a `with` block: to export, to average, to generate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shoal.errors import UsageError
from shoal.layout.buffer import shard_of, shard_views
from shoal.runtime.fsdp_module import FSDPModule
from shoal.runtime.gather_hooks import refusal
from shoal.runtime.module_state import state_of
from shoal.runtime.unit import Unit


@contextmanager
def full_parameters(
    module: nn.Module, *, recurse: bool = True, writeback: bool = False
) -> Iterator[None]:
    """Hold all parameters below a module in full, registered on their modules.

    They have the dtype of compute, and forwards inside the block gather nothing, so this is also
    what makes `generate()` fast. With `writeback`, what the block changed in them reaches the
    shards; every rank must then make the same changes.
    """
    units = _units(module, recurse)
    for unit in units:
        unit.prepare_alone()
        if unit.phase == "sharded":
            unit.launch_gather()
    were_kept = {unit: unit.is_kept for unit in units}
    for unit in units:
        unit.hold()
        unit.is_kept = True
    try:
        yield
        if writeback:
            for unit in units:
                _write_back(unit)
    finally:
        for unit in units:
            unit.full.come_home()
            if not were_kept[unit]:
                unit.reshard()
                unit.arena.trim()  # training has never all units full at once


def _units(module: nn.Module, recurse: bool) -> list[Unit]:
    units: dict[Unit, None] = {}
    for child in module.modules() if recurse else (module,):
        state = state_of(child)
        if state is not None:
            units.update(dict.fromkeys(state.units))
    if not units and not isinstance(module, FSDPModule):
        raise UsageError(
            f"nothing below this {type(module).__name__} was given to fully_shard, so there is "
            "nothing to gather"
        )
    return list(units)


@torch.no_grad()
def _write_back(unit: Unit) -> None:
    """Take over the elements that were changed; the others keep what compute's dtype rounds."""
    if unit.shards.extended:
        # What was gathered may have lost precision that the shards still have.
        name = unit.shards.members[min(unit.shards.extended)].spec.name
        raise refusal(name, "full_parameters(writeback=True)")
    full = [
        member.form.grad_data(parameter.detach())
        for member, parameter in zip(unit.shards.members, unit.full.parameters, strict=True)
    ]
    packing = unit.compute_packing
    changed = shard_views(packing, unit.rank, shard_of(packing, unit.rank, full))
    for member, new in zip(unit.shards.members, changed, strict=True):
        local = member.local
        local.copy_(torch.where(new == local.to(new.dtype), local, new.to(local.dtype)))
    unit.gathered_version = unit.version
