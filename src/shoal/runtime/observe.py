"""What can be seen of a sharded model: the events of its steps, and its plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from shoal.errors import InvariantError, UsageError
from shoal.runtime.events import Recorder
from shoal.runtime.fsdp_module import own_state
from shoal.runtime.module_state import context_of, state_of
from shoal.runtime.plan import Plan, UnitPlan
from shoal.runtime.unit import Unit


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
    """What a step of a model does, as data; prefetching set by hand is not in it.

    Call it on the root. Before the first forward the order is the declared one.
    """
    context = context_of(module, own_state(module))
    names: dict[Unit, str] = {}
    for unit in context.units:
        count = sum(other.name == unit.name for other in names)
        names[unit] = unit.name if count == 0 else f"{unit.name} ({count + 1})"
    states = {state for child in module.modules() if (state := state_of(child)) is not None}
    kept = {
        names[unit]
        for state in states
        for unit in state.units
        if state.reshard_after_forward is False
        or (state.reshard_after_forward is None and unit in context.roots)
    }
    return Plan(
        units=tuple(replace(UnitPlan.of(unit), name=names[unit]) for unit in context.units),
        variants=tuple(tuple(names[unit] for unit in order) for order in context.orders.variants),
        roots=frozenset(names[unit] for unit in context.roots),
        kept=frozenset(kept),
        max_reductions=min((unit.options.max_reductions for unit in context.units), default=1),
    )
