"""When the collectives of a lowered function run: merged, started early, waited for late."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph

from shoal.compile.aot.lowered import Lowered
from shoal.compile.observe.observation import say
from shoal.compile.observe.topics import Topic
from shoal.compile.options import Options
from shoal.compile.passes.bucket import FIRST_BUCKET_BYTES, MB
from shoal.compile.passes.collectives import CommKind
from shoal.compile.passes.comm_block import CommBlock, get_all_comm_blocks
from shoal.compile.passes.cost import Costs
from shoal.compile.passes.in_place import average_in_place
from shoal.compile.passes.standard import sharded
from shoal.compile.passes.tidy import drop_idle_views
from shoal.compile.passes.timeline import timeline

UNITS_AHEAD = 2
"""By default as many bytes may be on their way as this many of the largest collective have."""
SAME_SIZE = (CommKind.ALL_REDUCE, CommKind.BROADCAST)
"""What takes as much memory before as after: to wait for it early would free nothing."""


def schedule_collectives(lowered: Lowered, options: Options) -> None:
    """Put the collectives of both graphs where they overlap with what computes."""
    modules = [one for one in (lowered.forward, lowered.backward) if one is not None]
    blocks = [get_all_comm_blocks(module.graph) for module in modules]
    if not any(blocks):
        return
    for module, found in zip(modules, blocks, strict=True):
        if found:
            _schedule(module.graph, found, options)
        drop_idle_views(module.graph)
        if options.inner == "direct":
            average_in_place(module.graph)
        module.recompile()


def _schedule(graph: Graph, blocks: Sequence[CommBlock], options: Options) -> None:
    bucket_bytes = max(1, int(options.bucket_mb * MB))
    passes = sharded(
        bucket_bytes=bucket_bytes,
        first_bytes=_first_bytes(blocks),
        max_in_flight_bytes=_bound(blocks, bucket_bytes, options.in_flight_mb),
        costs=Costs() if options.prefetch == "just_in_time" else None,
    )
    report = passes.run(graph)
    say(Topic.COLLECTIVES, lambda: f"{report}\n{timeline(graph, Costs())}")


def _first_bytes(blocks: Sequence[CommBlock]) -> int | None:
    """The size of the first bucket of gradients; None where a small one is not worth it.

    What it leaves behind would be less than it has itself, and would cost another collective.
    """
    reduced = sum(b.num_bytes for b in blocks if b.key.kind is CommKind.ALL_REDUCE)
    return FIRST_BUCKET_BYTES if reduced > 2 * FIRST_BUCKET_BYTES else None


def _bound(
    blocks: Sequence[CommBlock], bucket_bytes: int, in_flight_mb: float | None
) -> int | None:
    """How many bytes may be on their way at a time; None for as many as there are."""
    if in_flight_mb is not None:
        return max(1, int(in_flight_mb * MB))
    if all(block.key.kind in SAME_SIZE for block in blocks):
        return None
    return UNITS_AHEAD * max(bucket_bytes, *(block.num_bytes for block in blocks))
