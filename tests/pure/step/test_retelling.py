"""A machine that is told another one's moments gives its answers, whatever moments these are."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pure.layout.strategies import profile
from pure.step.test_machine import Driver, model
from shoal.step.action import Actions
from shoal.step.machine import Machine
from shoal.step.rehearsal import rehearse
from shoal.step.retelling import NAMES, REQUESTS, Listening, Retelling, StepMoment
from shoal.step.unit_step import UnitStep


def by_name(actions: Actions) -> list[str]:
    return [str(action) for action in actions]


class Echo:
    """Tells a second machine every moment as soon as the first one has answered."""

    def __init__(self, machine: Machine, ledger: Any) -> None:
        self.machine, self.ledger = machine, ledger
        self.retelling = Retelling(machine, self._stand_in)
        self.original: Machine
        self.said: list[StepMoment] = []

    def beginning(self, name: str) -> None:
        assert name in ("begin_forward", "begin_backward")
        for mine, theirs in zip(self.machine.units, self.original.units, strict=True):
            mine.settings, mine.keeps_piece = theirs.settings, theirs.keeps_piece

    def told(self, moment: StepMoment, actions: Actions) -> None:
        self.said.append(moment)
        for mine, theirs in zip(self.machine.units, self.original.units, strict=True):
            mine.copies_first = theirs.copies_first
        answer = self.retelling.tell(moment)
        assert by_name(answer) == by_name(actions), moment
        phases = [unit.phase for unit in self.machine.units]
        assert phases == [unit.phase for unit in self.original.units], moment

    def present(self, unit: UnitStep) -> tuple[int, ...]:
        return (0,) if unit.has_grads or unit.has_sums else ()

    def _stand_in(self, unit: UnitStep, present: tuple[int, ...]) -> None:
        assert bool(present) == (unit.has_grads or unit.has_sums)


class ToldDriver(Driver):
    """Its machine is listened to."""

    def __init__(self, data: st.DataObject) -> None:
        super().__init__(data)
        self.echo = Echo(*model())
        self.echo.original = self.machine
        self.machine = cast(Machine, Listening(self.machine, self.echo))

    def _ask_by_hand(self) -> None:
        listening = cast(Any, self.machine)
        for unit in listening.units:
            for name in ("prefetch", "hold", "release"):
                if self.draw(st.integers(0, 9)) == 0:
                    actions = getattr(unit, name)()
                    listening.requested(name, unit, actions)
                    self.ledger.perform(actions)


@profile(150)
@given(st.data())
def test_the_second_machine_answers_as_the_first(data: st.DataObject) -> None:
    driver = ToldDriver(data)
    for _ in range(data.draw(st.integers(1, 3))):
        driver.step()
    assert driver.echo.said


def test_units_that_are_reduced_in_turn_are_so_on_the_second_machine() -> None:
    """There the runs decide that a backward may come to, which the second machine has not seen."""
    machine, _ = model()
    echo = Echo(*model())
    echo.original = machine
    for unit in machine.units:
        unit.settings = replace(unit.settings, reduces_unused=True)
    listening = cast(Machine, Listening(machine, echo))
    paths = {unit: () if unit.name == "root" else (unit.name,) for unit in machine.units}
    rehearse(listening, machine.units, paths)
    assert any(moment.runs for moment in echo.said)


def test_a_moment_that_no_machine_knows_is_refused_by_name() -> None:
    machine, _ = model()
    retelling = Retelling(machine, lambda *_: None)
    with pytest.raises(ValueError, match="'__init__'"):
        retelling.tell(StepMoment("__init__", 0))


@pytest.mark.parametrize("name", sorted(NAMES - REQUESTS))
def test_every_moment_is_passed_on_with_whatever_is_said_of_it(name: str) -> None:
    """A keyword that a machine learns must not be one that a listener in its place refuses."""
    told = inspect.signature(getattr(Machine, name)).parameters.values()
    heard = inspect.signature(getattr(Listening, name)).parameters
    assert any(one.kind is one.VAR_KEYWORD for one in heard.values()) or all(
        one.name in heard for one in told
    )
