"""Random programs leave a sharded model as they leave its unsharded twin."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings

from harness import on_ranks
from programs.draw import programs
from programs.moments import FailInBackward, Freeze, Moment, SaveAndLoad, Train, Update
from programs.net import Way
from programs.program import Program
from programs.twins import Setup
from shoal.layout import Even, Flat, Layout, Rows, Whole


def budget(num: int) -> Any:
    """How many programs."""
    return settings(
        max_examples=num,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )


def check(program: Program, num_ranks: int = 2) -> None:
    note(str(program))
    on_ranks(num_ranks, Program.run, program, timeout_s=30)


@budget(60)
@given(programs(2))
def test_steps(program: Program) -> None:
    check(program)


@budget(20)
@given(programs(2, api="wrapper"))
def test_steps_of_the_wrapper(program: Program) -> None:
    check(program)


@budget(15)
@given(programs(2, compiles=True))
def test_compiled_steps(program: Program) -> None:
    check(program)


def accumulating(last: Way) -> Program:
    """Gradients of one cell wait, and a compiled backward that does not come to it reduces."""
    layouts = (Whole(), Flat(), Whole(), Rows())
    setup = Setup(("plain",) * 3, layouts, (False, True, True, False), compiled="model")
    alone = Way(num_cells=3, is_alone=True)
    return Program(setup, [Train(Way()), Train(alone, reduces=False), Train(last)])


@pytest.mark.parametrize("last", [Way(num_cells=1), Way(num_cells=2, detaches_at=1)])
def test_sums_that_wait_are_reduced_by_a_compiled_backward(last: Way) -> None:
    on_ranks(2, Program.run, accumulating(last), timeout_s=60)


def frozen_while_sums_wait(*, names: tuple[str, ...]) -> Program:
    """One rank alone has gradients of a cell, of which parameters are frozen before they go out."""
    layouts = (Rows(), Whole(), Even(), Whole())
    reshards = (False, False, True, True)
    setup = Setup(("plain", "plain", "twice"), layouts, reshards, "SGD", is_parallel=True)
    ways = [
        Way(is_parallel=True, uses=uses)
        for uses in (
            ((True, True, False), (True, False, True)),
            ((True, True, False), (False, False, False)),
        )
    ]
    alone = Way(num_cells=1, is_alone=True)
    moments = [Train(ways[0], reduces=False), Train(ways[1], reduces=False)]
    return Program(setup, [*moments, Freeze(2, names, trains=False), Train(alone)])


@pytest.mark.parametrize(
    "names", [("gain",), ("up.weight", "up.bias", "down.weight", "down.bias", "gain")]
)
def test_ranks_reduce_alike_what_was_frozen_while_its_sums_wait(names: tuple[str, ...]) -> None:
    on_ranks(2, Program.run, frozen_while_sums_wait(names=names), timeout_s=60)


@pytest.mark.parametrize("is_parallel", [False, True])
def test_assigned_parameters_know_nothing_of_a_backward_that_raised(is_parallel: bool) -> None:
    setup = Setup(("plain",) * 3, (Whole(),) * 4, (False,) * 4, is_parallel=is_parallel)
    moments = [Train(Way(), reduces=False), FailInBackward(0, reduces=True, drops=False)]
    program = Program(setup, [*moments, SaveAndLoad(assigns=True), Train(Way())])
    on_ranks(2, Program.run, program, timeout_s=60)


def after_a_detached_one(*, compiled: str | None) -> Program:
    """A parameter gets no gradient in a backward that reduces; the next one keeps its gradients."""
    setup = Setup(("plain",) * 3, (Even(),) * 4, (False,) * 4, compiled=compiled)
    moments = [Train(Way(num_cells=1, detaches_at=0)), Train(Way(num_cells=1), reduces=False)]
    return Program(setup, [*moments, Train(Way(num_cells=1))])


@pytest.mark.parametrize("compiled", [None, "model", "cells"])
def test_a_kept_gradient_is_not_shown_on_the_shard(compiled: str | None) -> None:
    on_ranks(2, Program.run, after_a_detached_one(compiled=compiled), timeout_s=60)


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("layout", [Even(), Whole()], ids=str)
def test_a_backward_that_raised_and_then_one_of_fewer_cells(layout: Layout, reduces: bool) -> None:
    """What the first had reduced stays on the shards; the rest waits for the next reduction."""
    setup = Setup(("plain",) * 3, (layout,) * 4, (False,) * 4)
    moments: list[Moment] = [FailInBackward(0, reduces=True, drops=False)]
    moments += [Train(Way(num_cells=1), reduces)]
    moments += [Train(Way()), Update(Way(), clips=False, sets_to_none=True)]
    program = Program(setup, moments)
    on_ranks(2, Program.run, program, timeout_s=60)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@budget(1400)
@given(programs(2))
def test_many_steps(program: Program) -> None:
    check(program)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@budget(400)
@given(programs(2, api="wrapper"))
def test_many_steps_of_the_wrapper(program: Program) -> None:
    check(program)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@budget(200)
@given(programs(2, compiles=True))
def test_many_compiled_steps(program: Program) -> None:
    check(program)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@budget(200)
@given(programs(4))
def test_many_steps_on_four_ranks(program: Program) -> None:
    check(program, 4)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@budget(60)
@given(programs(2, compiled="model"))
def test_many_steps_of_a_compiled_model(program: Program) -> None:
    check(program)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@budget(60)
@given(programs(2, compiled="cells"))
def test_many_steps_of_compiled_cells(program: Program) -> None:
    check(program)
