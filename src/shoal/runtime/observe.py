"""What can be seen of a sharded model: the events of its steps, and its plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace

from torch import nn

from shoal.errors import InvariantError, UsageError
from shoal.runtime.events import Recorder
from shoal.runtime.fsdp_module import own_state
from shoal.runtime.guard import plan_unit
from shoal.runtime.module_state import context_of
from shoal.runtime.unit import Unit
from shoal.step.plan import Plan, UnitPlan
from shoal.step.settings import Settings
from shoal.step.unit_step import UnitStep


@contextmanager
def watch(module: nn.Module) -> Iterator[Recorder]:
    """Record the events of what the model does inside the `with` block."""
    context = context_of(module, own_state(module))
    if not context.units:
        raise UsageError(f"this {type(module).__name__} has no parameters, so nothing to watch")
    if context.recorder is not None:
        raise InvariantError("this model is being watched already; leave the other watch first")
    context.recorder = recorder = Recorder(context.units[0].device)
    try:
        yield recorder
    finally:
        context.recorder = None


def plan_of(module: nn.Module) -> Plan:
    """What a step of a model does, as data: the step machine run over the order of its units.

    Call it on the root. Before the first forward the order is the declared one.
    """
    context = context_of(module, own_state(module))
    names: dict[UnitStep, str] = {}
    for unit in context.units:
        count = sum(step.name == unit.name for step in names)
        names[unit.step] = unit.name if count == 0 else f"{unit.name} ({count + 1})"
    orders = context.machine.orders.variants
    return Plan(
        units=tuple(_planned(unit, names) for unit in context.units),
        variants=tuple(tuple(names[step] for step in order) for order in orders),
        roots=frozenset(names[unit.step] for unit in context.roots),
    )


def _planned(unit: Unit, names: dict[UnitStep, str]) -> UnitPlan:
    options = unit.options
    settings = {one.name: getattr(options, one.name) for one in fields(Settings)}
    ahead = {
        key: None if (steps := settings.pop(key)) is None else tuple(names[one] for one in steps)
        for key in ("forward_prefetch", "backward_prefetch")
    }
    return replace(
        plan_unit(unit),
        name=names[unit.step],
        path=() if unit.name == "root" else tuple(unit.name.split(".")),
        keeps_piece=unit.step.keeps_piece,
        settings=Settings(**settings),
        **ahead,
    )
