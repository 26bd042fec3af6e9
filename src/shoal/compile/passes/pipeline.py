"""Every pass that rewrites a graph: one ordered list for each stage.

    trace ─► joint ─► partitioner: before_cut, cut ─┬─► forward  ─┐
                                                    └─► backward ─┴─► cache ─► collectives ─► inner
                                                                               compiler
Each function here gives the `Pipeline` of a stage. `Pipeline.run` lints the graph and checks its
metadata after each pass. Graphs that the cache had begin at `collectives`, which are made for what
is known of the run: sizes of buckets, what may be in flight, a user's own passes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from functools import partial

from shoal.comm.buckets import FIRST_BUCKET_BYTES, Limits
from shoal.compile.partition.mutation import protect_old_values
from shoal.compile.partition.prepare import complete_phases, complete_tags, drop_repeated
from shoal.compile.passes.bucket_all_reduce import bucket_all_reduces
from shoal.compile.passes.bucket_shards import bucket_all_gathers, bucket_reduce_scatters
from shoal.compile.passes.contract import ORDER, Fact, Pass, Pipeline
from shoal.compile.passes.cost import Costs
from shoal.compile.passes.ddp_fusion import (
    fuse_ddp_with_coalesced_op,
    fuse_ddp_with_concat_op,
    schedule_comm_wait,
)
from shoal.compile.passes.decompose import decompose_dropout_backward
from shoal.compile.passes.in_place import average_in_place, update_in_place
from shoal.compile.passes.inductor_rewrites import compare_instead_of_scatter, keep_old_values
from shoal.compile.passes.operator_writes import write_by_operators
from shoal.compile.passes.schedule import overlap
from shoal.compile.passes.trace_cleanup import (
    detach_scattered,
    drop_aliases,
    drop_dead_nodes,
    rebind_sizes,
    tag_for_torch,
)
from shoal.compile.passes.view_cleanup import drop_idle_views


class Target(StrEnum):
    """The compiler that makes functions of the graphs, which decides the rewrites that pay."""

    DIRECT = "direct"
    """Operators are called one by one: each view, copy and operator less saves a call."""
    INDUCTOR = "inductor"
    """Operators are fused, and memory is planned."""
    GIVEN = "given"
    """A compiler that the caller passed: it gets graphs as they were traced."""


def _pass(
    run: Callable[..., object],
    *,
    requires: Iterable[Fact] = (),
    provides: Iterable[Fact] = (),
    undoes: Iterable[Fact] = (),
    **options: object,
) -> Pass:
    """A pass with the name of its function, which is called with these options."""
    return Pass(
        name=run.__name__,
        run=partial(run, **options),
        requires=frozenset(requires),
        provides=frozenset(provides),
        undoes=frozenset(undoes),
    )


def joint(target: Target, *, trains: bool) -> Pipeline:
    """Passes over the captured graph of forward and backward, before a partitioner sees it."""
    cleanup = (
        _pass(rebind_sizes, requires={Fact.PHASES}, provides={Fact.FORWARD_SIZES}),
        _pass(drop_aliases, provides={Fact.NO_ALIASES}),
        # Earlier, its own `detach` would be dropped.
        _pass(detach_scattered, requires={Fact.NO_ALIASES}),
        _pass(drop_dead_nodes, requires={Fact.FORWARD_SIZES, Fact.NO_ALIASES}),
    )
    tags = (_pass(tag_for_torch, requires={Fact.PHASES}),)
    inductor = (
        _pass(compare_instead_of_scatter),
        _pass(keep_old_values, requires={Fact.INPUT_COPIES}),
    )
    return Pipeline(
        passes=(
            *cleanup,
            *(tags if trains else ()),
            *(inductor if target is Target.INDUCTOR else ()),
        ),
        given=frozenset({Fact.PHASES, Fact.INPUT_COPIES}),
        counts=False,
    )


def before_cut(
    *, num_fwd_outputs: int, mutated_inputs: Collection[int] = (), dedupe: bool = True
) -> Pipeline:
    """Passes over a partitioner's copy of a joint graph, which another tracer may have made."""
    ready = {Fact.PHASES, Fact.CHECKPOINT_TAGS, Fact.OLD_VALUES}
    return Pipeline(
        passes=(
            _pass(complete_phases, provides={Fact.PHASES}),
            _pass(complete_tags, provides={Fact.CHECKPOINT_TAGS}),
            _pass(
                protect_old_values,
                requires={Fact.PHASES},
                provides={Fact.OLD_VALUES},
                num_fwd_outputs=num_fwd_outputs,
                mutated_inputs=mutated_inputs,
            ),
            *((_pass(drop_repeated, requires=ready),) if dedupe else ()),
        ),
        counts=False,
    )


def forward(target: Target) -> Pipeline:
    """Passes over a forward graph, before it goes to the cache."""
    # Inductor calls operators on inputs by itself, where that keeps old values.
    by_operators = (_pass(write_by_operators, requires={Fact.INPUT_COPIES}),)
    direct = (
        _pass(drop_idle_views),
        _pass(update_in_place, undoes={Fact.INPUT_COPIES}),
        _pass(decompose_dropout_backward),
    )
    return Pipeline(
        passes=(
            *(() if target is Target.INDUCTOR else by_operators),
            *(direct if target is Target.DIRECT else ()),
        ),
        given=frozenset({Fact.INPUT_COPIES}),
        counts=False,
    )


def backward(target: Target) -> Pipeline:
    """Passes over a backward graph, before it goes to the cache."""
    direct = (
        # Gradients are autograd's, which does not ask of what they are views.
        _pass(drop_idle_views, also_returned=True),
        _pass(decompose_dropout_backward),
    )
    return Pipeline(passes=direct if target is Target.DIRECT else (), counts=False)


def sharded(
    *,
    bucket_bytes: int,
    max_in_flight_bytes: int | None,
    max_gathered_bytes: int | None = None,
    max_reduced_bytes: int | None = None,
    first_bytes: int | None = FIRST_BUCKET_BYTES,
    costs: Costs | None = None,
) -> Pipeline:
    """For graphs that gather parameters and scatter gradients, or average whole ones.

    These are the passes that a user's option `passes` edits. The first bucket of whole gradients
    may be smaller, so that it is on its way early. The bounds are those of `overlap`. With costs,
    gathers start just in time instead of as early as there is room.
    """
    limits = Limits(num_bytes=bucket_bytes)
    first_bytes = None if first_bytes is None else min(bucket_bytes, first_bytes)
    first = Limits(num_bytes=bucket_bytes, first_bytes=first_bytes)
    bounds = (max_in_flight_bytes, max_gathered_bytes, max_reduced_bytes)
    bounded = () if all(bound is None for bound in bounds) else (Fact.BOUNDED_BYTES,)
    # Buckets first, if at all: they would undo an order of single collectives.
    unordered = {Fact.NOT_IN_ORDER_YET}
    buckets = (
        (bucket_all_gathers, limits, Fact.BUCKETED_ALL_GATHERS),
        (bucket_reduce_scatters, limits, Fact.BUCKETED_REDUCE_SCATTERS),
        (bucket_all_reduces, first, Fact.BUCKETED_ALL_REDUCES),
    )
    return Pipeline(
        passes=(
            *(
                _pass(bucket, requires=unordered, provides={fact}, undoes=ORDER, limits=limit)
                for bucket, limit, fact in buckets
            ),
            _pass(
                overlap,
                provides={Fact.EARLY_STARTS, Fact.LATE_WAITS, *bounded},
                undoes=unordered,
                max_in_flight_bytes=max_in_flight_bytes,
                max_gathered_bytes=max_gathered_bytes,
                max_reduced_bytes=max_reduced_bytes,
                costs=costs,
            ),
        ),
        given=frozenset(unordered),
    )


def after_collectives(target: Target) -> Pipeline:
    """Passes over a graph whose collectives are in their places."""
    direct = (_pass(average_in_place),) if target is Target.DIRECT else ()
    return Pipeline(passes=(_pass(drop_idle_views), *direct))


def replicated(*, bucket_size_mb: float, coalesced: bool = False) -> Pipeline:
    """For graphs with DDP's gradient all-reduces, as torch's own compiler has them."""
    fuse = fuse_ddp_with_coalesced_op if coalesced else fuse_ddp_with_concat_op
    bucketed = {Fact.BUCKETED_ALL_REDUCES}
    return Pipeline(
        passes=(
            _pass(fuse, provides=bucketed, undoes=ORDER, bucket_size_mb=bucket_size_mb),
            _pass(schedule_comm_wait, provides={Fact.LATE_WAITS}),
        )
    )
