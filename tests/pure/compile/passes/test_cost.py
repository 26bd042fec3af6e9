"""Estimated times, and what they steer."""

from __future__ import annotations

import functools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from comm_graphs import all_reduce, capture, check_same, gather, integers, scatter, wait
from comm_programs import Step, inputs, program, programs
from shoal.errors import UsageError
from shoal.passes import Costs, Machine, count_traffic, overlap, timeline

SLOW_LINK = Machine(
    flops_per_us=1.0, memory_bytes_per_us=1e9, call_us=0.0, link_bytes_per_us=1.0, link_latency_us=0
)
"""A product of 2 × 8 and 8 × 8 takes 256 us, a gather of 8 × 8 floats as many."""


def once(x: Tensor, *shards: Tensor) -> Tensor:
    """Each layer uses its weight four times."""
    for shard in shards:
        weight = wait(gather(shard))
        for _ in range(4):
            x = x @ weight
    return x


def arguments(num: int = 5) -> tuple[Tensor, ...]:
    return (integers(2, 8), *(integers(8, 8).sign() for _ in range(num)))


def test_a_timeline_has_two_clocks() -> None:
    costs = Costs(machine=SLOW_LINK)
    in_turn = capture(once, *arguments()).graph
    assert timeline(in_turn, costs).total_us == 5 * (256 + 4 * 256)
    assert timeline(in_turn, costs).exposed_us == 5 * 256
    assert timeline(in_turn, costs).link_us == 5 * 256
    overlap(in_turn)
    assert timeline(in_turn, costs).exposed_us == 256, "the first has nothing to hide behind"


def test_reductions_go_round_twice_and_measured_times_count() -> None:
    def fn(x: Tensor) -> list[Tensor]:
        return [wait(all_reduce(x)), wait(scatter(x))]

    graph = capture(fn, integers(8, 8)).graph
    costs = Costs(machine=SLOW_LINK)
    assert timeline(graph, costs).link_us == 3 * 256
    (reduce, *_) = [node for node in graph.nodes if "all_reduce" in node.name]
    assert timeline(graph, Costs(machine=SLOW_LINK, measured_us={reduce.name: 7})).link_us == 263


def test_gathers_just_in_time_take_less_memory_and_no_more_time() -> None:
    costs = Costs(machine=SLOW_LINK)
    early = check_same(capture(once, *arguments()), arguments(), overlap).graph
    run = functools.partial(overlap, costs=costs)
    in_time = check_same(capture(once, *arguments()), arguments(), run).graph
    assert count_traffic(early).max_in_flight_bytes == 5 * 256
    assert count_traffic(in_time).max_in_flight_bytes == 256
    assert timeline(in_time, costs) == timeline(early, costs)


def test_a_link_that_is_too_slow_is_never_idle() -> None:
    """Ten times as slow: then all gathers start at once, as without a model."""
    slower = Machine(flops_per_us=1.0, call_us=0.0, memory_bytes_per_us=1e9, link_bytes_per_us=0.1)
    costs = Costs(machine=slower)
    early = capture(once, *arguments()).graph
    overlap(early)
    in_time = capture(once, *arguments()).graph
    overlap(in_time, costs=costs)
    assert timeline(in_time, costs).total_us == timeline(early, costs).total_us


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(steps=programs(), speed=st.sampled_from([1e-2, 1.0, 1e2]), bound=st.integers(1, 1000))
def test_programs_survive_with_any_costs(steps: list[Step], speed: float, bound: int) -> None:
    costs = Costs(machine=Machine(link_bytes_per_us=speed))
    run = functools.partial(overlap, max_in_flight_bytes=bound, costs=costs)
    module = check_same(capture(program(steps), *inputs()), inputs(), run)
    found = timeline(module.graph, costs)
    assert found.exposed_us <= found.total_us


def test_wrong_machines_are_refused() -> None:
    with pytest.raises(UsageError, match="link_bytes_per_us=0"):
        Machine(link_bytes_per_us=0)
    with pytest.raises(UsageError, match="call_us=-1"):
        Machine(call_us=-1)
