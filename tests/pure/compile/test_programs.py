"""Random programs run compiled as they run eagerly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, note, settings
from hypothesis import strategies as st

from compile_compare import BACKEND, Entry, Scenario, backward_all, compare, compiled, observe
from pure.compile.programs import RandomProgram, random_programs

ROUNDING = 1e-5
"""A graph adds its own gradients up before autograd adds others to them, and reads a strided input
that it has written to from dense memory: sums are in another order than eager's."""

MULTIPLE = (".split(", ".unbind(")
"""Eager forbids writing to one of several views made at once, a graph need not."""

MOVES = (".t_(", "squeeze_(")
"""Eager counts changes of a view's shape as writes to its base, a graph does not."""


def check(program: RandomProgram, scenario: Scenario, through: Entry) -> None:
    """Compare one program with eager; skip it where eager or Dynamo itself fails."""
    run, inputs = program.load()
    edits = scenario == "edit" and not any(call in program.source for call in MULTIPLE)
    scenarios: tuple[Scenario, ...] = ("train", "edit") if edits else ("train",)
    if scenario == "infer":
        scenarios = ("infer",)
    seen = observe(run, inputs, scenario=scenarios[0], steps=1, backward=backward_all)
    assume(seen[-1].error is None)
    if through == "compile":
        # Dynamo does not read all programs, whatever compiles what it reads.
        read = compiled(run, backend="eager", through=through)
        seen = observe(read, inputs, scenario=scenarios[0], steps=1, backward=backward_all)
        assume(seen[-1].error is None)
    note(program.source)
    # Views made at once may come back untied; a refusal by name is an honest answer.
    ignore = ("*: relation (out*",) if any(c in program.source for c in MULTIPLE) else ()
    if any(call in program.source for call in MOVES):
        ignore += ("*.bumped",)
    if BACKEND != "shoal":
        # Torch refuses some programs that eager runs, and may draw again in backward.
        ignore += ("*: error", "*: rng")
    compare(
        run,
        inputs,
        through=through,
        scenarios=scenarios,
        ignore=ignore,
        tolerance=ROUNDING,
        may_refuse="",
    )


def budget(examples: int) -> Any:
    """How many programs; they differ in cost by the compiler's first calls."""
    return settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
        phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
    )


TIED = BACKEND == "shoal"
"""Torch gives wrong results for inputs that share memory, see the tables of aliased inputs."""

SCENARIOS = st.sampled_from(["train", "edit", "infer"])


@budget(120)
@given(program=random_programs(tied=TIED), scenario=SCENARIOS)
def test_straight(program: RandomProgram, scenario: Scenario) -> None:
    check(program, scenario, "aot")


@budget(50)
@given(program=random_programs(tied=False, most_steps=14), scenario=SCENARIOS)
def test_straight_and_long(program: RandomProgram, scenario: Scenario) -> None:
    check(program, scenario, "aot")


@budget(30)
@given(program=random_programs(tied=TIED), scenario=SCENARIOS)
def test_through_dynamo(program: RandomProgram, scenario: Scenario) -> None:
    check(program, scenario, "compile")
    torch._dynamo.reset()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@budget(1700)
@given(program=random_programs(tied=TIED, most_steps=12), scenario=SCENARIOS)
def test_soak_straight(program: RandomProgram, scenario: Scenario) -> None:
    check(program, scenario, "aot")


@pytest.mark.soak
@pytest.mark.timeout(3600)
@budget(300)
@given(program=random_programs(tied=TIED, most_steps=12), scenario=SCENARIOS)
def test_soak_through_dynamo(program: RandomProgram, scenario: Scenario) -> None:
    check(program, scenario, "compile")
    torch._dynamo.reset()
