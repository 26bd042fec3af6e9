"""A step that nobody computes: the moments of a whole forward and backward, told to a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.step.action import Action, Actions
from shoal.step.machine import Machine
from shoal.step.unit_step import ModuleRun, UnitStep

Path = tuple[str, ...]


def rehearse(
    machine: Machine, order: Sequence[UnitStep], paths: Mapping[UnitStep, Path]
) -> Actions:
    """What the machine answers to a training step whose forward takes an order.

    Backward goes the way back, to every unit. It leaves a unit where its inputs have derivatives:
    where something that is trained has computed before.
    """
    actions: list[Action] = []
    machine.begin_forward()
    runs = [(unit, ModuleRun()) for unit in order]
    way: list[tuple[int, bool]] = []
    """Which run was entered (True), or left."""
    stack: list[int] = []

    def leave() -> None:
        number = stack.pop()
        way.append((number, False))
        actions.extend(machine.leave_forward(order[number]))

    for number, (unit, run) in enumerate(runs):
        while stack and not _is_inside(unit, order[stack[-1]], paths):
            leave()
        way.append((number, True))
        stack.append(number)
        actions += machine.enter_forward(unit, is_stale=False)
        if machine.is_in_turn:
            unit.runs.add(run)
    while stack:
        leave()
    actions += machine.end_forward(expects_backward=True)
    actions += machine.begin_backward()
    for number, was_entered in reversed(way):
        unit, run = runs[number]
        if not was_entered:
            actions += machine.enter_backward(unit, run)
        else:
            # Gradients come with the last backward of a unit that ran several times.
            unit.has_grads = unit.is_trained and unit not in order[:number]
            if unit.has_grads:
                actions += machine.gradient_arrived(unit)
            if any(before.is_trained for before in order[:number]):
                actions += machine.leave_backward(unit, run)
    actions += machine.end_backward()
    return tuple(actions)


def _is_inside(unit: UnitStep, other: UnitStep, paths: Mapping[UnitStep, Path]) -> bool:
    """Whether a unit runs inside of another's module, or is another unit of the same module."""
    around, inner = paths[other], paths[unit]
    return unit is not other and inner[: len(around)] == around
