"""Random programs survive every pass: sound, as many bytes, the same bits."""

from __future__ import annotations

import functools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from comm_graphs import capture, check_same
from comm_programs import Step, inputs, program, programs
from shoal.compile.passes.comm_block import get_all_comm_blocks
from shoal.compile.passes.in_place import average_in_place, update_in_place
from shoal.compile.passes.view_cleanup import drop_idle_views
from shoal.passes import (
    Limits,
    bucket_all_gathers,
    bucket_all_reduces,
    bucket_reduce_scatters,
    count_traffic,
    delay_waits,
    overlap,
    replicated,
    sharded,
)

BOUND = 160
PASSES = {
    "delay": delay_waits,
    "overlap": overlap,
    "bounded": functools.partial(overlap, max_in_flight_bytes=BOUND),
    "gathers": functools.partial(bucket_all_gathers, limits=Limits(num_bytes=1024)),
    "scatters": functools.partial(bucket_reduce_scatters, limits=Limits(num_bytes=1024)),
    "gathers together": functools.partial(
        bucket_all_gathers, limits=Limits(num_bytes=1024), together=True
    ),
    "scatters together": functools.partial(
        bucket_reduce_scatters, limits=Limits(num_bytes=1024), together=True
    ),
    "reduces": functools.partial(bucket_all_reduces, limits=Limits(num_bytes=1024)),
    "small": functools.partial(bucket_all_reduces, limits=Limits(num_bytes=128)),
    "rows": replicated(bucket_size_mb=25).run,
    "lists": replicated(bucket_size_mb=25, coalesced=True).run,
    "tidy": drop_idle_views,
    "in place": average_in_place,
    "updates": update_in_place,
    "sharded": sharded(bucket_bytes=1024, max_in_flight_bytes=BOUND).run,
}
quick = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("name", PASSES)
@quick
@given(steps=programs(), mode=st.sampled_from(["fake", "fake", "real"]))
def test_programs_survive(name: str, steps: list[Step], mode: str) -> None:
    check_same(capture(program(steps), *inputs(), mode=mode), inputs(), PASSES[name])


@quick
@given(steps=programs(), bound=st.integers(1, 1000))
def test_bytes_in_flight_stay_within_the_bound(steps: list[Step], bound: int) -> None:
    graph = capture(program(steps), *inputs()).graph
    largest = max((block.num_bytes for block in get_all_comm_blocks(graph)), default=0)
    overlap(graph, bound)
    assert count_traffic(graph).max_in_flight_bytes <= max(bound, largest)


@quick
@given(steps=programs(), order=st.permutations(sorted(PASSES)))
def test_passes_follow_each_other_in_any_order(steps: list[Step], order: list[str]) -> None:
    module = capture(program(steps), *inputs())

    def run(graph) -> None:
        for name in order[:4]:
            PASSES[name](graph)

    check_same(module, inputs(), run)
