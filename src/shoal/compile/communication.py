"""When the collectives of a lowered function run: merged, started early, waited for late."""

from __future__ import annotations

from torch.fx import GraphModule

from shoal.compile.aot.lowered import Lowered
from shoal.compile.observe.observation import say
from shoal.compile.observe.topics import Topic
from shoal.compile.options import Options
from shoal.compile.passes.bucket import MB
from shoal.compile.passes.comm_block import get_all_comm_blocks
from shoal.compile.passes.standard import sharded

UNITS_AHEAD = 2
"""By default as many bytes may be on their way as this many of the largest collective have."""


def schedule_collectives(lowered: Lowered, options: Options) -> None:
    """Put the collectives of both graphs where they overlap with what computes."""
    for module in (lowered.forward, lowered.backward):
        if module is not None:
            _schedule(module, options)


def _schedule(module: GraphModule, options: Options) -> None:
    blocks = get_all_comm_blocks(module.graph)
    if not blocks:
        return
    bucket_bytes = max(1, int(options.bucket_mb * MB))
    bound = options.in_flight_mb
    largest = max(bucket_bytes, *(block.num_bytes for block in blocks))
    passes = sharded(
        bucket_bytes=bucket_bytes,
        max_in_flight_bytes=UNITS_AHEAD * largest if bound is None else max(1, int(bound * MB)),
    )
    report = passes.run(module.graph)
    module.recompile()
    say(Topic.COLLECTIVES, lambda: str(report))
