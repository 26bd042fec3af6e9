"""Whatever moments come, in whatever order, the machine's actions can be done and lose nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pure.layout.strategies import profile
from pure.step.executor import Account, Ledger
from shoal.step.action import ActionKind
from shoal.step.machine import Machine
from shoal.step.phase import Phase
from shoal.step.rehearsal import rehearse
from shoal.step.settings import Settings
from shoal.step.unit_step import ModuleRun, UnitStep, undo

NAMES = ("root", "a", "a.x", "b", "c")
PATHS = {"root": (), "a": ("a",), "a.x": ("a", "x"), "b": ("b",), "c": ("c",)}

settings = st.builds(
    Settings,
    reduces=st.booleans(),
    reshards_after_forward=st.none() | st.booleans(),
    reshards_after_backward=st.booleans(),
    gathers_in_backward=st.booleans(),
    prefetches_late=st.booleans(),
    prefetch_depth=st.integers(0, 3),
    copy_depth=st.integers(0, 2),
    max_reductions=st.integers(1, 3),
)


def model() -> tuple[Machine, Ledger]:
    steps = [UnitStep(name) for name in NAMES]
    return Machine(steps, steps[:1]), Ledger({step: Account() for step in steps})


class Driver:
    """Calls modules at random, as a user's model might."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw = data.draw
        self.machine, self.ledger = model()
        self.runs: list[tuple[UnitStep, ModuleRun]] = []
        self.arrived = 0

    def step(self) -> None:
        machine, ledger = self.machine, self.ledger
        for unit in machine.units:
            unit.settings = self.draw(settings)
            unit.keeps_piece = self.draw(st.booleans())
            unit.copies_first = self.draw(st.booleans())
        self._ask_by_hand()
        machine.begin_forward()
        self.runs = []
        trains = self.draw(st.booleans())
        if not self._call(machine.units[0], trains, depth=0):
            machine.abort_forward()
            return
        ledger.perform(machine.end_forward(expects_backward=trains))
        ledger.check_phases()
        assert not any(one.has_copy for one in ledger.accounts.values()), ledger.log
        self._ask_by_hand()
        if trains:
            self._backward()

    def _call(self, unit: UnitStep, trains: bool, depth: int) -> bool:
        """One call of a module; says whether it returned."""
        machine, ledger = self.machine, self.ledger
        is_stale = not unit.is_bare and self.draw(st.booleans())
        ledger.perform(machine.enter_forward(unit, is_stale=is_stale))
        assert ledger.accounts[unit].memory is Phase.HELD, ledger.log
        run = ModuleRun()
        self.runs.append((unit, run))
        children = st.lists(st.sampled_from(machine.units[1:]), max_size=3)
        for child in self.draw(children) if depth < 2 else ():
            if child is not unit and not self._call(child, trains, depth + 1):
                ledger.perform(machine.raise_forward(unit))
                return False
        if self.draw(st.integers(0, 15)) == 0:
            ledger.perform(machine.raise_forward(unit))
            return False
        ledger.perform(machine.leave_forward(unit, is_reached=trains, is_expected=trains))
        ledger.check_phases()
        return True

    def _backward(self) -> None:
        machine, ledger = self.machine, self.ledger
        creates_graph = self.draw(st.booleans())
        ledger.perform(machine.begin_backward(creates_graph=creates_graph))
        for unit, run in reversed(self.runs):
            if self.draw(st.integers(0, 5)) == 0:
                continue  # not part of the loss
            ledger.perform(machine.enter_backward(unit, run, creates_graph=creates_graph))
            if unit.phase is Phase.BACKWARD:
                assert ledger.accounts[unit].memory is Phase.HELD, ledger.log
            if self.draw(st.booleans()):  # a recomputation
                ledger.perform(machine.enter_forward(unit, is_stale=False, is_nested=True))
                ledger.perform(machine.leave_forward(unit, is_nested=True))
            if self.draw(st.booleans()):
                self._arrive(unit)
            if self.draw(st.integers(0, 20)) == 0:
                self._abandon()
                return
            if self.draw(st.integers(0, 3)):
                ledger.note_grads()
                ledger.perform(machine.leave_backward(unit, run))
            ledger.check_phases()
        for unit in machine.units:
            if self.draw(st.integers(0, 5)) == 0:
                self._arrive(unit)
        ledger.note_grads()
        ledger.perform(machine.end_backward(keeps_graph=creates_graph))
        ledger.check_phases()
        self._check_ended()

    def _arrive(self, unit: UnitStep) -> None:
        """A gradient, unless the machine refuses it."""
        before = len(self.ledger.refused)
        self.ledger.perform(self.machine.gradient_arrived(unit))
        if len(self.ledger.refused) == before:
            self.ledger.accounts[unit].grads += 1
            self.arrived += 1

    def _abandon(self) -> None:
        """A backward raised: executors keep gradients that were taken, and finish reductions."""
        ledger = self.ledger
        ledger.perform(self.machine.abandon())
        for unit, account in ledger.accounts.items():
            account.sums += account.grads + (account.taken or 0)
            account.grads, account.taken = 0, None
            unit.has_sums = account.sums > 0
        for unit, num in ledger.in_flight:
            ledger.accounts[unit].reduced += num
        ledger.in_flight.clear()
        ledger.check_phases()
        assert all(one.memory is Phase.SHARDED for one in ledger.accounts.values()), ledger.log

    def _ask_by_hand(self) -> None:
        """`unshard()`, `reshard()`, state dicts: between anything."""
        for unit in self.machine.units:
            match self.draw(st.integers(0, 8)):
                case 0:
                    self.ledger.perform(unit.prefetch())
                case 1:
                    self.ledger.perform(unit.hold())
                    unit.is_kept = True
                case 2:
                    self.ledger.perform(unit.release())
                case _:
                    pass
        self.ledger.check_phases()

    def _check_ended(self) -> None:
        """No reduction is left, no gradient is lost, and what should be freed is."""
        ledger = self.ledger
        accounts = ledger.accounts.values()
        assert not ledger.in_flight, ledger.log
        assert all(account.grads == 0 and account.taken is None for account in accounts), ledger.log
        assert sum(account.reduced + account.sums for account in accounts) == self.arrived
        for unit, account in ledger.accounts.items():
            if unit.settings.reshards_after_backward and not unit.is_in_graph:
                assert account.memory is Phase.SHARDED, ledger.log
            if unit.settings.reduces:
                assert account.sums == 0, ledger.log
            assert account.memory is not Phase.GATHERING, ledger.log
            assert account.num_copies == 0, ledger.log


@profile(400)
@given(st.data())
def test_any_program(data: st.DataObject) -> None:
    driver = Driver(data)
    for _ in range(data.draw(st.integers(1, 4))):
        driver.step()


class Rank:
    """One of several ranks that run the same forwards, and use different units in backward."""

    def __init__(self, each: list[Settings], frozen: set[str], borrowed: set[str]) -> None:
        self.machine, self.ledger = model()
        self.runs: list[tuple[UnitStep, ModuleRun]] = []
        for unit, one in zip(self.machine.units, each, strict=True):
            unit.settings, unit.is_trained = one, unit.name not in frozen
            unit.is_borrowed = unit.name in borrowed

    def forward(self, order: list[int]) -> None:
        machine, perform = self.machine, self.ledger.perform
        root, self.runs = machine.units[0], []
        machine.begin_forward()
        perform(machine.enter_forward(root, is_stale=False))
        for number in order:
            unit = machine.units[number]
            perform(machine.enter_forward(unit, is_stale=False))
            self._run(unit)
            perform(machine.leave_forward(unit))
        self._run(root)
        perform(machine.leave_forward(root))
        perform(machine.end_forward(expects_backward=True))

    def _run(self, unit: UnitStep) -> None:
        run = ModuleRun(is_borrowed=unit.is_borrowed)
        unit.runs.add(run)
        self.runs.append((unit, run))

    def backward(self, reached: set[int], *, creates_graph: bool) -> None:
        machine, ledger = self.machine, self.ledger
        ledger.perform(machine.begin_backward(creates_graph=creates_graph))
        for number, (unit, run) in reversed([*enumerate(self.runs)]):
            if unit is machine.units[0] or number in reached:  # the root's outputs are the loss
                ledger.perform(machine.enter_backward(unit, run, creates_graph=creates_graph))
                ledger.accounts[unit].grads += unit.is_trained
                ledger.note_grads()
                ledger.perform(machine.leave_backward(unit, run))
        ledger.note_grads()
        ledger.perform(machine.end_backward(keeps_graph=creates_graph))
        ledger.check_phases()

    @property
    def collectives(self) -> list[str]:
        return [one for one in self.ledger.log if one.startswith(("gather", "reduce"))]


@profile(200)
@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.integers(1, len(NAMES) - 1), max_size=5),
            st.lists(st.booleans(), min_size=1, max_size=3),
        ),
        min_size=1,
        max_size=3,
    ),
    each=st.lists(settings, min_size=len(NAMES), max_size=len(NAMES)),
    frozen=st.sets(st.sampled_from(NAMES)),
    borrowed=st.sets(st.sampled_from(NAMES)),
    data=st.data(),
)
def test_ranks_that_use_different_units_communicate_alike(
    steps: list[tuple[list[int], list[bool]]],
    each: list[Settings],
    frozen: set[str],
    borrowed: set[str],
    data: st.DataObject,
) -> None:
    """Where units are reduced in turn. Each step has several backwards; some create graphs."""
    each = [replace(one, reduces_unused=True) for one in each]
    ranks = [Rank(each, frozen, borrowed) for _ in range(2)]
    for order, backwards in steps:
        for rank in ranks:
            rank.forward(order)
        for creates_graph in backwards:
            for rank in ranks:
                reached = data.draw(st.sets(st.integers(0, 5)))
                rank.backward(reached, creates_graph=creates_graph)
            assert ranks[0].collectives == ranks[1].collectives


@profile(200)
@given(
    order=st.lists(st.sampled_from(NAMES[1:]), max_size=9),
    each=st.lists(settings, min_size=len(NAMES), max_size=len(NAMES)),
    frozen=st.sets(st.sampled_from(NAMES)),
)
def test_a_rehearsed_step_reduces_every_unit_once(
    order: list[str], each: list[Settings], frozen: set[str]
) -> None:
    machine, ledger = model()
    by_name = {unit.name: unit for unit in machine.units}
    for unit, one in zip(machine.units, each, strict=True):
        unit.settings = replace(one, reduces=True)
        unit.is_trained = unit.name not in frozen
    names = ["root", *order]
    paths = {by_name[name]: path for name, path in PATHS.items()}
    actions = rehearse(machine, [by_name[name] for name in names], paths)
    ledger.perform(actions)
    reduced = [action.unit.name for action in actions if action.kind is ActionKind.REDUCE]
    assert sorted(reduced) == sorted(set(names) - frozen)
    assert [a.unit.name for a in actions if a.kind is ActionKind.FORWARD] == names
    assert not ledger.in_flight


def test_a_step_of_two_blocks() -> None:
    steps = [UnitStep(name) for name in ("root", "a", "b")]
    machine = Machine(steps, steps[:1])
    paths: Any = dict(zip(steps, ((), ("a",), ("b",)), strict=True))
    assert [str(action) for action in rehearse(machine, steps, paths)] == [
        *("gather root", "wait root", "forward root", "gather a"),
        *("wait a", "forward a", "gather b", "free a"),
        *("wait b", "forward b", "free b", "rest root"),
        *("wake root", "backward root", "gather b"),
        *("wait b", "backward b", "gather a", "take b", "free b", "pack b", "reduce b"),
        *("wait a", "backward a", "take a", "free a", "finish b", "pack a", "reduce a"),
        *("take root", "free root", "finish a", "pack root", "reduce root"),
        *("finish root", "place root"),
    ]


def test_shards_on_the_host_are_copied_one_unit_further_than_gathered() -> None:
    steps = [UnitStep(name) for name in ("root", "a", "b", "c")]
    machine = Machine(steps, steps[:1])
    for step in steps:
        step.copies_first = True
    paths: Any = {step: () if step.name == "root" else (step.name,) for step in steps}
    assert [str(action) for action in rehearse(machine, steps, paths)] == [
        *("copy root", "gather root", "wait root", "forward root", "copy a", "gather a", "copy b"),
        *("wait a", "forward a", "gather b", "copy c", "free a"),
        *("wait b", "forward b", "gather c", "free b"),
        *("wait c", "forward c", "free c", "rest root"),
        *("wake root", "backward root", "copy c", "gather c", "copy b"),
        *("wait c", "backward c", "gather b", "copy a", "take c", "free c", "pack c"),
        *("gather a", "reduce c"),
        *("wait b", "backward b", "take b", "free b", "finish c", "pack b", "reduce b"),
        *("wait a", "backward a", "take a", "free a", "finish b", "pack a", "reduce a"),
        *("take root", "free root", "finish a", "pack root", "reduce root"),
        *("finish root", "place root"),
    ]


def test_gathers_go_before_reductions() -> None:
    steps = [UnitStep(name) for name in ("root", "a", "b", "c", "d")]
    machine = Machine(steps, steps[:1])
    paths: Any = {step: () if step.name == "root" else (step.name,) for step in steps}
    log = [str(action) for action in rehearse(machine, steps, paths)]
    assert log[log.index("backward d") :][:8] == [
        *("backward d", "gather c", "take d", "free d", "pack d", "gather b", "reduce d", "wait c")
    ]
    assert log[log.index("backward c") :][:7] == [
        *("backward c", "take c", "free c", "finish d", "pack c", "gather a", "reduce c")
    ]


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_prefetch_depth(depth: int) -> None:
    steps = [UnitStep(name) for name in ("root", "a", "b", "c", "d")]
    for step in steps:
        step.settings = Settings(prefetch_depth=depth)
    machine = Machine(steps, steps[:1])
    paths: Any = {step: () if step.name == "root" else (step.name,) for step in steps}
    log = [str(action) for action in rehearse(machine, steps, paths)]
    ahead = log[: log.index("wait a")]
    assert [one for one in ahead if one.startswith("gather")] == [
        f"gather {name}" for name in ("root", "a", "b", "c", "d")[: max(depth, 1) + 1]
    ]
    backward = log[log.index("backward root") : log.index("take d")]
    assert [one for one in backward if one.startswith("gather")] == [
        f"gather {name}" for name in ("d", "c", "b", "a")[: depth + 1]
    ]


def test_what_did_not_happen_is_undone() -> None:
    steps = [UnitStep(name) for name in ("root", "a")]
    machine = Machine(steps, steps[:1])
    machine.begin_forward()
    actions = machine.enter_forward(steps[0], is_stale=False)
    assert [str(a) for a in actions] == ["gather root", "wait root", "forward root", "gather a"]
    undo(actions[1:])  # waiting for the gather raised
    assert [step.phase for step in steps] == [Phase.GATHERING, Phase.SHARDED]
    undo(steps[0].release())  # cancelled although it raised
    assert steps[0].phase is Phase.SHARDED
    steps[0].copies_first = True
    undo(steps[0].prefetch())  # the copy raised
    assert (steps[0].phase, steps[0].is_copied) == (Phase.SHARDED, False)


def test_moments_of_nobody_mean_nothing() -> None:
    machine, _ = model()
    unit = machine.units[1]
    assert machine.leave_forward(unit) == ()
    assert machine.raise_forward(unit) == ()
    assert machine.leave_backward(unit, ModuleRun()) == ()


def test_refusals() -> None:
    machine, _ = model()
    unit = machine.units[1]
    assert [a.kind for a in machine.gradient_arrived(unit)] == [ActionKind.REFUSE_BLIND]
    assert machine.gradient_arrived(unit, is_handed_over=True) == ()
    refused = machine.enter_backward(unit, ModuleRun(), is_current=False)
    assert [a.kind for a in refused] == [ActionKind.REFUSE_CHANGED]


def test_importing_the_machine_loads_no_torch() -> None:
    code = "import sys, shoal.step.machine, shoal.step.plan; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
