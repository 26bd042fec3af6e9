"""Bucket the collectives of a lowered function, start them early and wait for them late."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.fx import GraphModule

from shoal.comm.buckets import FIRST_BUCKET_BYTES, MIB
from shoal.comm.collectives import Kind as CommKind
from shoal.compile.aot.lowered import Lowered
from shoal.compile.compare_ranks import collectives_of, tell_groups
from shoal.compile.observe.logs import Topic
from shoal.compile.observe.observation import run_passes, say
from shoal.compile.options import BackendOptions
from shoal.compile.passes.comm_block import CommBlock, get_all_comm_blocks
from shoal.compile.passes.contract import Pipeline, Report
from shoal.compile.passes.cost import Costs
from shoal.compile.passes.pipeline import Target, after_collectives, sharded
from shoal.compile.passes.traffic import timeline
from shoal.errors import UsageError

SAME_SIZE = (CommKind.ALL_REDUCE, CommKind.BROADCAST)
"""Collectives whose input and result are equally large: waiting early would free nothing."""


def schedule_collectives(lowered: Lowered, options: BackendOptions, prefetch_depth: int) -> None:
    """Put the collectives of both graphs where they overlap with what computes.

    So many units are gathered ahead, as without a graph. Passes of the user's see graphs without
    collectives too.
    """
    modules = [one for one in (lowered.forward, lowered.backward) if one is not None]
    blocks = [get_all_comm_blocks(module.graph) for module in modules]
    if not any(blocks) and options.passes is None:
        return
    groups = collectives_of(lowered)
    try:
        for phase, module, found in zip(("forward", "backward"), modules, blocks, strict=False):
            if found or options.passes is not None:
                passes = _passes(found, options, prefetch_depth)
                report = run_passes(f"collectives, {phase}", passes, module)
                _log(report, module)
            run_passes(
                f"after_collectives, {phase}", after_collectives(Target(options.inner)), module
            )
    except Exception as error:
        rank = dist.get_rank() if groups else 0
        tell_groups(groups, f"rank {rank} raised in its passes: {type(error).__name__}: {error}")
        raise


def _log(report: Report, module: GraphModule) -> None:
    say(Topic.COLLECTIVES, lambda: f"{report}\n{timeline(module.graph, Costs())}")


def _passes(blocks: Sequence[CommBlock], options: BackendOptions, prefetch_depth: int) -> Pipeline:
    """The passes over the collectives of one graph, edited by the user's option if that is set."""
    bucket_bytes = max(1, int(options.bucket_mb * MIB))
    passes = sharded(
        bucket_bytes=bucket_bytes,
        first_bytes=_first_bytes(blocks),
        max_in_flight_bytes=_bound(blocks, bucket_bytes, options.in_flight_mb, prefetch_depth),
        costs=Costs() if options.prefetch == "just_in_time" else None,
    )
    return passes if options.passes is None else _edited(passes, options.passes)


def _edited(passes: Pipeline, edit: Callable[[Pipeline], object]) -> Pipeline:
    """The pipeline that a user's function makes of the passes; it has checked itself."""
    edited = edit(passes)
    if not isinstance(edited, Pipeline):
        raise UsageError(
            "option 'passes' of the shoal backend: expected a function that returns a Pipeline of "
            f"shoal.passes, such as the one it is given; {edit!r} returned {edited!r}"
        )
    return edited


def _first_bytes(blocks: Sequence[CommBlock]) -> int | None:
    """The size of the first bucket of gradients; None where a small one is not worth it.

    What it leaves behind would be less than it has itself, and would cost another collective.
    """
    reduced = sum(b.num_bytes for b in blocks if b.key.kind is CommKind.ALL_REDUCE)
    return FIRST_BUCKET_BYTES if reduced > 2 * FIRST_BUCKET_BYTES else None


def _bound(
    blocks: Sequence[CommBlock], bucket_bytes: int, in_flight_mb: float | None, prefetch_depth: int
) -> int | None:
    """How many bytes may be on their way at a time; None for as many as there are.

    By default as many as the largest collectives have: that of the unit which computes, and those
    of the units ahead.
    """
    if in_flight_mb is not None:
        return max(1, int(in_flight_mb * MIB))
    if all(block.key.kind in SAME_SIZE for block in blocks):
        return None
    sizes = sorted(max(bucket_bytes, block.num_bytes) for block in blocks)
    return sum(sizes[-1 - prefetch_depth :])
