"""Every pass that rewrites a graph: one ordered list for each stage.

    trace ─► joint ─► partitioner: before_cut, cut ─┬─► forward  ─┐
                                                    └─► backward ─┴─► cache ─► collectives ─► inner
                                                                               compiler
Each function here gives the `Pipeline` of a stage. `Pipeline.run` lints the graph and checks its
metadata after each pass. Graphs that the cache had begin at `collectives`, which are made for what
is known of the run: sizes of buckets, what may be in flight, a user's own passes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
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
    """What makes a function of the graphs, which decides what is worth rewriting."""

    DIRECT = "direct"
    """Operators are called one by one: each view, copy and operator less saves a call."""
    INDUCTOR = "inductor"
    """Operators are fused, and memory is planned."""
    GIVEN = "given"
    """A compiler that the caller passed: it gets graphs as they were traced."""


def joint(target: Target, *, trains: bool) -> Pipeline:
    """Passes over the captured graph of forward and backward, before a partitioner sees it."""
    cleanup = (
        Pass(
            name="rebind_sizes",
            run=rebind_sizes,
            requires=frozenset({Fact.PHASES}),
            provides=frozenset({Fact.FORWARD_SIZES}),
        ),
        Pass(name="drop_aliases", run=drop_aliases, provides=frozenset({Fact.NO_ALIASES})),
        Pass(
            name="detach_scattered",
            run=detach_scattered,
            # Earlier, its own `detach` would be dropped.
            requires=frozenset({Fact.NO_ALIASES}),
        ),
        Pass(
            name="drop_dead_nodes",
            run=drop_dead_nodes,
            requires=frozenset({Fact.FORWARD_SIZES, Fact.NO_ALIASES}),
        ),
    )
    tags = (Pass(name="tag_for_torch", run=tag_for_torch, requires=frozenset({Fact.PHASES})),)
    inductor = (
        Pass(name="compare_instead_of_scatter", run=compare_instead_of_scatter),
        Pass(
            name="keep_old_values",
            run=keep_old_values,
            requires=frozenset({Fact.INPUT_COPIES}),
        ),
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
    once = Pass(
        name="drop_repeated",
        run=drop_repeated,
        requires=frozenset({Fact.PHASES, Fact.CHECKPOINT_TAGS, Fact.OLD_VALUES}),
    )
    return Pipeline(
        passes=(
            Pass(name="complete_phases", run=complete_phases, provides=frozenset({Fact.PHASES})),
            Pass(
                name="complete_tags",
                run=complete_tags,
                provides=frozenset({Fact.CHECKPOINT_TAGS}),
            ),
            Pass(
                name="protect_old_values",
                run=partial(
                    protect_old_values,
                    num_fwd_outputs=num_fwd_outputs,
                    mutated_inputs=mutated_inputs,
                ),
                requires=frozenset({Fact.PHASES}),
                provides=frozenset({Fact.OLD_VALUES}),
            ),
            *((once,) if dedupe else ()),
        ),
        counts=False,
    )


def forward(target: Target) -> Pipeline:
    """Passes over a forward graph, before it goes to the cache."""
    by_operators = Pass(
        name="write_by_operators",
        run=write_by_operators,
        requires=frozenset({Fact.INPUT_COPIES}),
    )
    direct = (
        Pass(name="drop_idle_views", run=drop_idle_views),
        Pass(
            name="update_in_place",
            run=update_in_place,
            undoes=frozenset({Fact.INPUT_COPIES}),
        ),
        Pass(name="decompose_dropout_backward", run=decompose_dropout_backward),
    )
    return Pipeline(
        passes=(
            # Inductor calls operators on inputs by itself, where that keeps old values.
            *(() if target is Target.INDUCTOR else (by_operators,)),
            *(direct if target is Target.DIRECT else ()),
        ),
        given=frozenset({Fact.INPUT_COPIES}),
        counts=False,
    )


def backward(target: Target) -> Pipeline:
    """Passes over a backward graph, before it goes to the cache."""
    direct = (
        Pass(
            name="drop_idle_views",
            # Gradients are autograd's, which does not ask of what they are views.
            run=partial(drop_idle_views, also_returned=True),
        ),
        Pass(name="decompose_dropout_backward", run=decompose_dropout_backward),
    )
    return Pipeline(passes=direct if target is Target.DIRECT else (), counts=False)


def sharded(
    *,
    bucket_bytes: int,
    max_in_flight_bytes: int | None,
    first_bytes: int | None = FIRST_BUCKET_BYTES,
    costs: Costs | None = None,
) -> Pipeline:
    """For graphs that gather parameters and scatter gradients, or average whole ones.

    These are the passes that a user's option `passes` edits. The first bucket of whole gradients
    may be smaller, so that it is on its way early. With costs, gathers start just in time instead
    of as early as there is room.
    """
    limits = Limits(num_bytes=bucket_bytes)
    first_bytes = None if first_bytes is None else min(bucket_bytes, first_bytes)
    first = Limits(num_bytes=bucket_bytes, first_bytes=first_bytes)
    bounded = () if max_in_flight_bytes is None else (Fact.BOUNDED_BYTES,)
    buckets = (
        (bucket_all_gathers, limits, Fact.BUCKETED_ALL_GATHERS),
        (bucket_reduce_scatters, limits, Fact.BUCKETED_REDUCE_SCATTERS),
        (bucket_all_reduces, first, Fact.BUCKETED_ALL_REDUCES),
    )
    return Pipeline(
        passes=(
            *(
                Pass(
                    name=bucket.__name__,
                    run=partial(bucket, limits=limit),
                    # First, if at all: they would undo an order of single collectives.
                    requires=frozenset({Fact.NOT_IN_ORDER_YET}),
                    provides=frozenset({fact}),
                    undoes=ORDER,
                )
                for bucket, limit, fact in buckets
            ),
            Pass(
                name="overlap",
                run=partial(overlap, max_in_flight_bytes=max_in_flight_bytes, costs=costs),
                provides=frozenset({Fact.EARLY_STARTS, Fact.LATE_WAITS, *bounded}),
                undoes=frozenset({Fact.NOT_IN_ORDER_YET}),
            ),
        ),
        given=frozenset({Fact.NOT_IN_ORDER_YET}),
    )


def after_collectives(target: Target) -> Pipeline:
    """Passes over a graph whose collectives are in their places."""
    direct = (Pass(name="average_in_place", run=average_in_place),)
    return Pipeline(
        passes=(
            Pass(name="drop_idle_views", run=drop_idle_views),
            *(direct if target is Target.DIRECT else ()),
        ),
    )


def replicated(*, bucket_size_mb: float, coalesced: bool = False) -> Pipeline:
    """For graphs with DDP's gradient all-reduces, as torch's own compiler has them."""
    fuse = fuse_ddp_with_coalesced_op if coalesced else fuse_ddp_with_concat_op
    return Pipeline(
        passes=(
            Pass(
                name=fuse.__name__,
                run=partial(fuse, bucket_size_mb=bucket_size_mb),
                provides=frozenset({Fact.BUCKETED_ALL_REDUCES}),
                undoes=ORDER,
            ),
            Pass(
                name="schedule_comm_wait",
                run=schedule_comm_wait,
                provides=frozenset({Fact.LATE_WAITS}),
            ),
        )
    )


def stages(target: Target) -> Iterator[tuple[str, Pipeline]]:
    """All passes of a training function in the order in which they run, by stage."""
    yield "joint", joint(target, trains=True)
    yield "before_cut", before_cut(num_fwd_outputs=0)
    yield "forward", forward(target)
    yield "backward", backward(target)
    yield "collectives", sharded(bucket_bytes=1, max_in_flight_bytes=None)
    yield "after_collectives", after_collectives(target)
