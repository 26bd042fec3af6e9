"""The pipelines that shoal uses."""

from __future__ import annotations

from functools import partial

from shoal.compile.passes.bucket import FIRST_BUCKET_BYTES, Limits
from shoal.compile.passes.bucket_all_reduce import bucket_all_reduces
from shoal.compile.passes.bucket_shards import bucket_all_gathers, bucket_reduce_scatters
from shoal.compile.passes.contract import ORDER, Fact, Pass
from shoal.compile.passes.cost import Costs
from shoal.compile.passes.ddp_fusion import (
    fuse_ddp_with_coalesced_op,
    fuse_ddp_with_concat_op,
    schedule_comm_wait,
)
from shoal.compile.passes.pipeline import Pipeline
from shoal.compile.passes.schedule import overlap


def replicated(*, bucket_size_mb: float, coalesced: bool = False) -> Pipeline:
    """For graphs with DDP's gradient all-reduces."""
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


def sharded(
    *,
    bucket_bytes: int,
    max_in_flight_bytes: int | None,
    first_bytes: int | None = FIRST_BUCKET_BYTES,
    costs: Costs | None = None,
) -> Pipeline:
    """For graphs that gather parameters and scatter gradients, or average whole ones.

    The first bucket of whole gradients may be smaller, so that it is on its way early. With costs,
    gathers start just in time instead of as early as there is room.
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
