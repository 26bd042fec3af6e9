"""The moments of one rank's machine, written down and told to another rank's: it answers the same.

A rank that has no more inputs holds shards that others gather. Its machine is told what theirs are
told (`shoal.join`), so that what it does comes from the same answers, and is no second description
of a step. `Listening` writes moments down, `Retelling` reads them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from shoal.step.action import Actions
from shoal.step.machine import Machine
from shoal.step.unit_step import ModuleRun, UnitStep


class GradientFacts(NamedTuple):
    """What an executor says of a unit's gradients before a moment that may reduce them."""

    unit: int
    has_grads: bool
    has_sums: bool
    present: tuple[int, ...]
    """The parameters whose gradients a reduction would have."""


class StepMoment(NamedTuple):
    """A moment as it was told to a machine; units and runs by number."""

    name: str
    """A method of `Machine`, or a request of users: a method of `UnitStep`."""
    unit: int = -1
    run: int = -1
    flags: Mapping[str, bool | int] = {}
    """The keywords; `user`, whatever computes with the unit, is a number here."""
    gradients: tuple[GradientFacts, ...] = ()
    runs: tuple[tuple[int, int], ...] = ()
    """The runs that a backward may come to, by unit, where units are reduced in turn."""


REQUESTS = frozenset({"prefetch", "hold", "release"})
"""What users may ask of one unit, at any moment."""
_WITH_UNIT = frozenset({"enter_forward", "leave_forward", "raise_forward", "gradient_arrived"})
_WITH_GRADIENTS = ("leave_backward", "end_backward", "reduce_all")
"""Those that say of which units there are gradients."""
_WITH_RUN = frozenset({"enter_backward", "leave_backward"})
_ALONE = frozenset(
    {
        *("begin_forward", "end_forward", "abort_forward", "begin_backward", "end_backward"),
        *("reduce_all", "abandon"),
    }
)
NAMES = REQUESTS | _WITH_UNIT | _WITH_RUN | _ALONE


class MomentListener(Protocol):
    """Hears what a machine is told."""

    def beginning(self, name: str) -> None:
        """A forward or a backward begins: the machine has not been told."""
        ...

    def told(self, moment: StepMoment, actions: Actions) -> None:
        """The machine has answered, and nothing has been performed."""
        ...

    def present(self, unit: UnitStep) -> tuple[int, ...]:
        """The parameters whose gradients a reduction of a unit would have now."""
        ...


class Listening:
    """Stands in a machine's place: hands moments on to it, and says them to a listener."""

    def __init__(self, machine: Machine, listener: MomentListener) -> None:
        self.machine = machine
        self._listener = listener
        self._numbers: weakref.WeakKeyDictionary[ModuleRun, int] = weakref.WeakKeyDictionary()
        self._num_runs = 0
        self._users: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._num_users = 0
        self._units = {unit: number for number, unit in enumerate(machine.units)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.machine, name)

    def begin_forward(self) -> None:
        """See `Machine.begin_forward`."""
        self._listener.beginning("begin_forward")
        self.machine.begin_forward()
        self._say(StepMoment("begin_forward"), ())

    def begin_backward(self, **flags: bool) -> Actions:
        """See `Machine.begin_backward`."""
        self._listener.beginning("begin_backward")
        actions = self.machine.begin_backward(**flags)
        runs: list[tuple[int, int]] = []
        if self.machine.is_in_turn:
            for number, unit in enumerate(self.machine.units):
                runs.extend((number, self._number(run)) for run in unit.runs)
        return self._say(StepMoment("begin_backward", flags=flags, runs=tuple(runs)), actions)

    def enter_forward(self, unit: UnitStep, **flags: Any) -> Actions:
        """See `Machine.enter_forward`."""
        return self._tell("enter_forward", unit, flags)

    def leave_forward(self, unit: UnitStep, **flags: Any) -> Actions:
        """See `Machine.leave_forward`."""
        return self._tell("leave_forward", unit, flags)

    def raise_forward(self, unit: UnitStep, **flags: Any) -> Actions:
        """See `Machine.raise_forward`."""
        return self._tell("raise_forward", unit, flags)

    def gradient_arrived(self, unit: UnitStep, **flags: bool) -> Actions:
        """See `Machine.gradient_arrived`."""
        return self._tell("gradient_arrived", unit, flags)

    def abort_forward(self) -> None:
        """See `Machine.abort_forward`."""
        self.machine.abort_forward()
        self._say(StepMoment("abort_forward"), ())

    def end_forward(self, **flags: bool) -> Actions:
        """See `Machine.end_forward`."""
        actions = self.machine.end_forward(**flags)
        return self._say(StepMoment("end_forward", flags=flags), actions)

    def enter_backward(self, unit: UnitStep, run: ModuleRun, **flags: bool) -> Actions:
        """See `Machine.enter_backward`."""
        moment = StepMoment("enter_backward", self._units[unit], self._number(run), flags)
        return self._say(moment, self.machine.enter_backward(unit, run, **flags))

    def leave_backward(self, unit: UnitStep, run: ModuleRun) -> Actions:
        """See `Machine.leave_backward`."""
        gradients = self._gradients(self.machine.reducible(unit, run))
        number = self._number(run)
        moment = StepMoment("leave_backward", self._units[unit], number, gradients=gradients)
        return self._say(moment, self.machine.leave_backward(unit, run))

    def end_backward(self, **flags: bool) -> Actions:
        """See `Machine.end_backward`."""
        gradients = self._gradients(self.machine.units)
        moment = StepMoment("end_backward", flags=flags, gradients=gradients)
        return self._say(moment, self.machine.end_backward(**flags))

    def reduce_all(self) -> Actions:
        """See `Machine.reduce_all`."""
        moment = StepMoment("reduce_all", gradients=self._gradients(self.machine.units))
        return self._say(moment, self.machine.reduce_all())

    def abandon(self) -> Actions:
        """See `Machine.abandon`."""
        return self._say(StepMoment("abandon"), self.machine.abandon())

    def requested(self, name: str, unit: UnitStep, actions: Actions) -> None:
        """A user has asked this of a unit, and it has answered."""
        self._say(StepMoment(name, self._units[unit]), actions)

    def _tell(self, name: str, unit: UnitStep, flags: dict[str, Any]) -> Actions:
        actions = getattr(self.machine, name)(unit, **flags)
        if flags.get("user") is not None:
            flags["user"] = self._user_number(flags["user"])
        return self._say(StepMoment(name, self._units[unit], flags=flags), actions)

    def _say(self, moment: StepMoment, actions: Actions) -> Actions:
        self._listener.told(moment, actions)
        return actions

    def _number(self, run: ModuleRun) -> int:
        number = self._numbers.get(run)
        if number is None:
            number = self._numbers[run] = self._num_runs
            self._num_runs += 1
        return number

    def _user_number(self, user: Any) -> int:
        number = self._users.get(user)
        if number is None:
            number = self._users[user] = self._num_users
            self._num_users += 1
        return number

    def _gradients(self, units: Iterable[UnitStep]) -> tuple[GradientFacts, ...]:
        present = self._listener.present
        facts = [
            GradientFacts(self._units[unit], unit.has_grads, unit.has_sums, present(unit))
            for unit in units
        ]
        return tuple(one for one in facts if any(one[1:]))


class Retelling:
    """Tells a machine the moments of another one."""

    def __init__(
        self, machine: Machine, stand_in: Callable[[UnitStep, tuple[int, ...]], object]
    ) -> None:
        self.machine = machine
        self._stand_in = stand_in
        """Told of the gradients that other ranks have, before the moment that may reduce them."""
        self._runs: dict[int, ModuleRun] = {}

    def tell(self, moment: StepMoment) -> Actions:
        """What the machine answers to a moment of another one."""
        name, machine = moment.name, self.machine
        if name in _WITH_GRADIENTS:
            self._note(moment.gradients)
        if name in _ALONE:
            actions = getattr(machine, name)(**moment.flags)
            if name == "begin_backward":
                self._begin_runs(moment.runs)
            return actions or ()
        if name not in NAMES:
            raise ValueError(f"expected a moment of a step, one of {sorted(NAMES)}, got {name!r}")
        unit = machine.units[moment.unit]
        if name in REQUESTS:
            return getattr(unit, name)()
        if name in _WITH_RUN:
            return getattr(machine, name)(unit, self._run(moment.run), **moment.flags)
        return getattr(machine, name)(unit, **moment.flags)

    def _note(self, gradients: Sequence[GradientFacts]) -> None:
        for unit in self.machine.units:
            unit.has_grads = False
        for number, has_grads, has_sums, present in gradients:
            unit = self.machine.units[number]
            unit.has_grads, unit.has_sums = has_grads, has_sums
            self._stand_in(unit, present)

    def _begin_runs(self, runs: Sequence[tuple[int, int]]) -> None:
        """Forget the runs of earlier backwards; those in which units are left are said anew."""
        self._runs.clear()
        if self.machine.is_in_turn:
            for unit in self.machine.units:
                unit.runs = weakref.WeakSet()
            for number, run in runs:
                self.machine.units[number].runs.add(self._run(run))

    def _run(self, number: int) -> ModuleRun:
        return self._runs.setdefault(number, ModuleRun())
