"""The pipelines that shoal uses."""

from __future__ import annotations

from functools import partial

from shoal.compile.passes.bucket import Limits
from shoal.compile.passes.bucket_all_gather import bucket_all_gathers
from shoal.compile.passes.bucket_all_reduce import bucket_all_reduces
from shoal.compile.passes.bucket_reduce_scatter import bucket_reduce_scatters
from shoal.compile.passes.contract import ORDER, Fact, Pass
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


def sharded(*, bucket_bytes: int, max_in_flight_bytes: int | None) -> Pipeline:
    """For graphs that gather parameters and scatter gradients; all-reduces are HSDP's."""
    limits = Limits(num_bytes=bucket_bytes)
    bounded = () if max_in_flight_bytes is None else (Fact.BOUNDED_BYTES,)
    buckets = (
        (bucket_all_gathers, Fact.BUCKETED_ALL_GATHERS),
        (bucket_reduce_scatters, Fact.BUCKETED_REDUCE_SCATTERS),
        (bucket_all_reduces, Fact.BUCKETED_ALL_REDUCES),
    )
    return Pipeline(
        passes=(
            *(
                Pass(
                    name=bucket.__name__,
                    run=partial(bucket, limits=limits),
                    provides=frozenset({fact}),
                    undoes=ORDER,
                )
                for bucket, fact in buckets
            ),
            Pass(
                name="overlap",
                run=partial(overlap, max_in_flight_bytes=max_in_flight_bytes),
                # Buckets first: a schedule of single collectives would be undone by them.
                requires=frozenset(fact for _, fact in buckets),
                provides=frozenset({Fact.EARLY_STARTS, Fact.LATE_WAITS, *bounded}),
            ),
        )
    )
