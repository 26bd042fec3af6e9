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
from shoal.compile.passes.memory import memory_of
from shoal.compile.passes.pipeline import Target, after_collectives, sharded
from shoal.compile.passes.schedule import Bounds
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
                _log(report, module, lowered, options)
            run_passes(
                f"after_collectives, {phase}", after_collectives(Target(options.inner)), module
            )
    except Exception as error:
        rank = dist.get_rank() if groups else 0
        tell_groups(groups, f"rank {rank} raised in its passes: {type(error).__name__}: {error}")
        raise


def _log(report: Report, module: GraphModule, lowered: Lowered, options: BackendOptions) -> None:
    def text() -> str:
        freed = lowered.freed_in(module)
        memory = memory_of(module.graph, freed, fuses=options.inner == "inductor")
        return f"{report}\n{timeline(module.graph, Costs())}\n{memory}"

    say(Topic.COLLECTIVES, text)


def _passes(blocks: Sequence[CommBlock], options: BackendOptions, prefetch_depth: int) -> Pipeline:
    """The passes over the collectives of one graph, edited by the user's option if that is set."""
    bucket_bytes = max(1, int(options.bucket_mb * MIB))
    bounds = _bounds(blocks, bucket_bytes, options.in_flight_mb, prefetch_depth)
    passes = sharded(
        bucket_bytes=bucket_bytes,
        first_bytes=_first_bytes(blocks),
        max_in_flight_bytes=bounds.in_flight,
        max_gathered_bytes=bounds.gathered,
        max_reduced_bytes=bounds.reduced,
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


def _bounds(
    blocks: Sequence[CommBlock], bucket_bytes: int, in_flight_mb: float | None, prefetch_depth: int
) -> Bounds:
    """How much memory collectives may have at a time.

    By default as much as in the eager engine: the unit that computes and those ahead are gathered,
    and one is reduced. They are counted by the largest, so that small ones need not wait.
    """
    if in_flight_mb is not None:
        return Bounds(in_flight=max(1, int(in_flight_mb * MIB)))
    if all(block.key.kind in SAME_SIZE for block in blocks):
        return Bounds()
    gathers = [block for block in blocks if block.key.kind is CommKind.ALL_GATHER]
    others = [block for block in blocks if block.key.kind is not CommKind.ALL_GATHER]
    return Bounds(
        gathered=_of_largest(1 + prefetch_depth, gathers, bucket_bytes),
        reduced=_of_largest(1, others, bucket_bytes),
    )


def _of_largest(num: int, blocks: Sequence[CommBlock], bucket_bytes: int) -> int | None:
    """The bytes of so many collectives when all are in buckets; None if there are none."""
    sizes = sorted((max(bucket_bytes, block.num_bytes) for block in blocks), reverse=True)
    return sum(sizes[:num]) or None
