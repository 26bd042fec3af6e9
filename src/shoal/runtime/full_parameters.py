"""Full parameters for as long as a `with` block: to export, to average, to generate."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from shoal.errors import InvariantError, UsageError
from shoal.layout.buffer import shard_of, shard_views
from shoal.runtime.fsdp_module import FSDPModule
from shoal.runtime.gather_hooks import refusal
from shoal.runtime.module_state import state_of, units_of
from shoal.runtime.shards import Member
from shoal.runtime.unit import Unit
from shoal.step.phase import Phase


@contextmanager
def full_parameters(
    module: nn.Module, *, recurse: bool = True, writeback: bool = False
) -> Iterator[None]:
    """Hold all parameters below a module in full, registered on their modules.

    All ranks enter and leave the block; inside nothing is communicated, so that one rank alone may
    run forwards, `generate()`, or `state_dict()`, which gives copies of the full parameters. They
    have the dtype of compute, unrounded by any `gather_format`. With `writeback`, what the block
    changed in them reaches the shards; every rank must then make the same changes.
    """
    units = _units(module, recurse)
    exact = {unit: unit.is_exact for unit in units}
    for unit in units:
        unit.prepare_alone()
        unit.is_exact = True
        unit.prefetch()
    before = {unit: (unit.step.is_kept, unit.step.is_lent) for unit in units}
    for unit in units:
        unit.hold()
        unit.step.is_kept = unit.step.is_lent = True
    with ExitStack() as stack:
        stack.callback(_give_back, before, exact)
        for unit in units:
            _serve_state_dicts(unit, stack, writeback)
        yield
        if writeback:
            for unit in units:
                _check_held(unit)
            for unit in units:
                _write_back(unit)


def _give_back(before: dict[Unit, tuple[bool, bool]], exact: dict[Unit, bool]) -> None:
    for unit, (was_kept, was_lent) in before.items():
        unit.step.is_lent = was_lent
        unit.full.come_home()
        unit.full.note_writes()  # what is not written back is dropped, as announced
        if not was_kept:
            unit.reshard()
            unit.arena.trim()  # training has never all units full at once
        unit.is_exact = exact[unit]


def _serve_state_dicts(unit: Unit, stack: ExitStack, writeback: bool) -> None:
    """Let state dicts have copies: the parameters' own memory is given back with the block."""
    copies: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def copy_out(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: object) -> None:
        for index, member in enumerate(unit.shards.members):
            for name in (home.name for home in member.homes if home.module is module):
                value = state_dict.get(prefix + name)
                if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
                    continue  # somebody took it out, or asked for the parameters themselves
                copy = copies.get(index)
                if copy is None or not any(copy is other for other in state_dict.values()):
                    copy = copies[index] = value.clone()
                state_dict[prefix + name] = copy  # one for all modules that share the parameter

    def refuse(*_: object) -> NoReturn:
        raise UsageError(
            f"load_state_dict in a full_parameters block: what it loads into unit {unit.name!r} "
            "would be dropped when the block ends. Pass writeback=True, and load the same on "
            "every rank, or load outside of the block"
        )

    for module in {home.module for member in unit.shards.members for home in member.homes}:
        stack.callback(module.register_state_dict_post_hook(copy_out).remove)
        if not writeback:
            stack.callback(module.register_load_state_dict_pre_hook(refuse).remove)


def _units(module: nn.Module, recurse: bool) -> list[Unit]:
    state = state_of(module)
    own = [] if state is None else list(state.used)
    units = units_of(module) if recurse else own
    if not units and not isinstance(module, FSDPModule):
        raise UsageError(
            f"nothing below this {type(module).__name__} was given to fully_shard, so there is "
            "nothing to gather"
        )
    return units


def _check_held(unit: Unit) -> None:
    if unit.phase is not Phase.HELD:
        raise InvariantError(
            f"full_parameters(writeback=True): unit {unit.name!r} was freed inside the block, with "
            "what the block had changed: a backward() or reshard() did it. Leave the block first"
        )


@torch.no_grad()
def _write_back(unit: Unit) -> None:
    """Take over the elements that were changed; the others keep what compute's dtype rounds."""
    if unit.shards.extended:
        # What was gathered may have lost precision that the shards still have.
        name = unit.shards.members[min(unit.shards.extended)].spec.name
        raise refusal(name, "full_parameters(writeback=True)")
    full = [
        member.wrapping.grad_data(_registered(unit, member).detach())
        for member in unit.shards.members
    ]
    packing = unit.compute_packing
    changed = shard_views(packing, unit.rank, shard_of(packing, unit.rank, full))
    for member, new in zip(unit.shards.members, changed, strict=True):
        local = member.local
        local.copy_(torch.where(new == local.to(new.dtype), local, new.to(local.dtype)))
    unit.gathered_version = unit.version


def _registered(unit: Unit, member: Member) -> nn.Parameter:
    """The full parameter as the block leaves it: perhaps another one (`assign=True`)."""
    parameters, name = member.places[0]
    found = parameters.get(name)
    if found is None or tuple(found.shape) != tuple(member.sharded.shape):
        raise InvariantError(
            f"full_parameters(writeback=True): expected parameter "
            f"{unit.qualified(member.spec.name)!r} of shape {tuple(member.sharded.shape)} at the "
            f"end of the block, got {None if found is None else tuple(found.shape)}. Change it in "
            "place (parameter.copy_)"
        )
    return found
