"""What a loop changes beside the step: settings, frozen parameters, dropped gradients.

A rank that has no more inputs does not run the loop that makes these changes, so it is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from shoal.runtime.context import Context
from shoal.runtime.policy import UnitOptions
from shoal.runtime.unit import Unit
from shoal.step.unit_step import UnitStep

UnitFacts = dict[str, Any]

_PLAIN = (bool, int, float, type(None))
_PREFETCHED = ("forward_prefetch", "backward_prefetch")


def facts_of(context: Context, untouched: Untouched) -> list[UnitFacts]:
    """What a shadow has to know of each unit of a model before the next moments."""
    numbers = {unit.step: number for number, unit in enumerate(context.units)}
    return [_facts_of_unit(unit, numbers, untouched) for unit in context.units]


def _facts_of_unit(unit: Unit, numbers: dict[UnitStep, int], untouched: Untouched) -> UnitFacts:
    sharded = unit.shards.sharded
    return {
        "zeroed": untouched.zeroed.get(unit, []),
        "options": _plain_options(unit.options, numbers),
        "trained": [parameter.requires_grad for parameter in sharded],
        "without_grad": untouched.without_grad(unit),
        "is_kept": unit.step.is_kept,
    }


def _plain_options(options: UnitOptions, numbers: dict[UnitStep, int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in fields(options):
        value = getattr(options, one.name)
        if one.name in _PREFETCHED:
            found[one.name] = None if value is None else [numbers[step] for step in value]
        elif isinstance(value, _PLAIN):
            found[one.name] = value
    return found


def follow_facts(context: Context, facts: Sequence[UnitFacts]) -> None:
    """Make a model's units what they are on the rank that goes on."""
    for unit, one in zip(context.units, facts, strict=True):
        options = dict(one["options"])
        for name in _PREFETCHED:
            if options[name] is not None:
                options[name] = tuple(context.units[number].step for number in options[name])
        new = replace(unit.options, **options)
        if new != unit.options:
            unit.options = new
        for parameter, is_trained in zip(unit.shards.sharded, one["trained"], strict=True):
            if parameter.requires_grad != is_trained:
                parameter.requires_grad_(is_trained)
        for index in one["without_grad"]:
            unit.shards.sharded[index].grad = None
        for index in one["zeroed"]:
            grad = unit.shards.sharded[index].grad
            if grad is not None:
                grad.zero_()
        unit.step.is_kept = one["is_kept"]


class Untouched:
    """What a loop may not change by itself, as it was when the engine last changed it."""

    def __init__(self, contexts: Sequence[Context]) -> None:
        self._units = [unit for context in contexts for unit in context.units]
        self._given = [_given_objects(unit) for unit in self._units]
        self.zeroed: dict[Unit, list[int]] = {}
        """The gradients that the loop has set to zero."""
        self._zero_grads: dict[int, bool] = {}
        """The parameters whose `zero_grad` was called, and whether it dropped their gradients."""
        self.note()

    def note(self) -> None:
        """The engine, an optimizer or clipping is done: everything is as it should be."""
        self.note_grads()
        self._versions = [unit.version for unit in self._units]

    def note_grads(self) -> None:
        """Gradients are as they should be."""
        self._zero_grads.clear()
        self._grads = [_grads_of(unit) for unit in self._units]

    def note_zero_grad(self, parameters: Iterable[torch.Tensor], *, set_to_none: bool) -> None:
        """The loop has called `zero_grad`: of parameters that this rank holds nothing of, no
        gradient shows it."""
        for parameter in parameters:
            self._zero_grads[id(parameter)] = set_to_none

    def without_grad(self, unit: Unit) -> list[int]:
        """The parameters of a unit that have no gradients, on ranks that hold some of them."""
        held = {i: p for i, p in enumerate(unit.shards.sharded) if _is_held(unit, i)}
        without = {i for i, p in held.items() if p.grad is None}
        if held and len(without) == len(held):
            return list(range(len(unit.shards.sharded)))
        for index, parameter in enumerate(unit.shards.sharded):
            if index not in held and self._zero_grads.get(id(parameter)):
                without.add(index)
        return sorted(without)

    def change(self) -> str:
        """Something that the loop has changed and shadows cannot follow, in words; or nothing."""
        self.zeroed = {
            unit: [
                index
                for index, parameter in enumerate(unit.shards.sharded)
                if self._zero_grads.get(id(parameter)) is False and not _is_held(unit, index)
            ]
            for unit in self._units
        }
        for unit, given, version, grads in zip(
            self._units, self._given, self._versions, self._grads, strict=True
        ):
            name = f"unit {unit.name!r}"
            if unit.step.is_lent:
                return f"full_parameters of {name} are open in the loop"
            if _given_objects(unit) != given:
                return f"the precision, a collective or a hook of {name} was changed in the loop"
            if unit.version != version:
                return (
                    f"parameters of {name} were changed in the loop, by an optimizer that "
                    "join was not given or by other code"
                )
            for index, (before, now) in enumerate(zip(grads, _grads_of(unit), strict=True)):
                if now == before or unit.shards.sharded[index].grad is None:
                    continue
                if _is_zero(unit, index):
                    self.zeroed[unit].append(index)
                else:
                    what = unit.qualified(unit.shards.members[index].spec.name)
                    return (
                        f"the gradient of {what!r} was changed in the loop, by a gradient scaler "
                        "that join was not given or by other code"
                    )
        return ""


def _grads_of(unit: Unit) -> list[tuple[int, int]]:
    """Which gradients there are, and how often they were changed."""
    found: list[tuple[int, int]] = []
    for member in unit.shards.members:
        grad = member.sharded.grad
        if grad is None:
            found.append((0, 0))
        else:
            local = member.wrapping.local_of(grad)
            found.append((id(grad), grad._version + (0 if local is None else local._version)))
    return found


def _is_held(unit: Unit, index: int) -> bool:
    """Whether this rank has elements of a parameter."""
    return unit.shards.members[index].local.numel() > 0


def _is_zero(unit: Unit, index: int) -> bool:
    member = unit.shards.members[index]
    assert member.sharded.grad is not None
    local = member.wrapping.local_of(member.sharded.grad)
    return local is not None and not bool(torch.count_nonzero(local))


def _given_objects(unit: Unit) -> list[Any]:
    """What users gave to a unit that is no plain value: it cannot be sent to another rank."""
    options = unit.options
    values = (getattr(options, one.name) for one in fields(options) if one.name not in _PREFETCHED)
    return [unit.policy, *(value for value in values if not isinstance(value, _PLAIN))]
