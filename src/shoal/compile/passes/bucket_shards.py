"""Bucket all-gathers and reduce-scatters: of CUDA tensors by one launch, of others in one row.

    all-gather
    rank 0    a0 b0 ┐                    ┌ a0 a1   each rank's part of a bucket is cut
    rank 1    a1 b1 ┴─► a0 b0 | a1 b1 ──►└ b0 b1   into its members, whose parts are joined

    reduce-scatter
    rank 0    a0 a1, b0 b1 ┐                            ┌ a0, b0   what goes to one rank must lie in
    rank 1    a0 a1, b0 b1 ┴─► a0 b0 | a1 b1  reduced ─►└ a1, b1   one piece, so members interleave

Each element is reduced on the same rank as before. Backends whose order of summing depends on where
in a buffer an element lies (gloo, on more than two ranks) may round it differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from operator import floordiv, mul

import torch
from torch import fx

from shoal.comm.buckets import Limits
from shoal.comm.collectives import Kind as CommKind
from shoal.compile.node_kinds import is_tensor, value
from shoal.compile.passes.bucket import BucketMember, CommBucket
from shoal.compile.passes.collectives import collective, group_size
from shoal.compile.passes.comm_block import CommBlock, get_all_comm_blocks
from shoal.compile.passes.fuse import Rewrite, first_of, fuse, launch_together, send, wait_for
from shoal.compile.passes.rewrite import call_function, compute, reshape, sizes, split

aten = torch.ops.aten
OPERATORS = {
    CommKind.ALL_GATHER: "all_gather_into_tensor",
    CommKind.REDUCE_SCATTER: "reduce_scatter_tensor",
}


def bucket_all_gathers(
    graph: fx.Graph, limits: Limits, *, together: bool | None = None
) -> list[CommBucket]:
    """Make one all-gather of those with equal keys; `together`, by one launch without copies."""
    return _bucket(graph, limits, CommKind.ALL_GATHER, rewrite_all_gathers, together)


def bucket_reduce_scatters(
    graph: fx.Graph, limits: Limits, *, together: bool | None = None
) -> list[CommBucket]:
    """Make one reduce-scatter of those with equal keys; `together`, by one launch."""
    return _bucket(graph, limits, CommKind.REDUCE_SCATTER, rewrite_reduce_scatters, together)


def _bucket(
    graph: fx.Graph, limits: Limits, kind: CommKind, in_one_row: Rewrite, together: bool | None
) -> list[CommBucket]:
    """Bucket the collectives of a kind: by one launch or in one row, by the device if unsaid."""

    def rewrite(graph: fx.Graph, bucket: CommBucket) -> Sequence[fx.Node]:
        on_cuda = bucket.last.key.device.type == "cuda"
        if on_cuda if together is None else together:
            return launch_together(graph, bucket, bucket.sources, f"{OPERATORS[kind]}_coalesced")
        return in_one_row(graph, bucket)

    members = [
        BucketMember(block=block, key=(block.key, group_size(block.comm_node)))
        for block in get_all_comm_blocks(graph)
        if block.key.kind is kind and _is_by_rank(block)
    ]
    return fuse(graph, members, limits, rewrite)


def _is_by_rank(block: CommBlock) -> bool:
    """Whether a collective gives new tensors, one for each that it takes."""
    op = collective(block.comm_node)
    return (
        op is not None
        and not op.writes
        and block.key.dtype is not None
        and len(block.inputs) == len(block.wait_nodes)
        and all(is_tensor(one) and value(one).dim() > 0 for one in block.inputs)
    )


def rewrite_all_gathers(graph: fx.Graph, bucket: CommBucket) -> list[fx.Node]:
    """Write one all-gather of a row for a bucket; give the new result for each old one."""
    sources, ranks = bucket.sources, group_size(bucket.last.comm_node)
    with graph.inserting_before(first_of(bucket.departure)):
        shapes = [sizes(graph, one) for one in sources]
        rows = [reshape(graph, one, [-1]) for one in sources]
        lengths = [sizes(graph, row)[0] for row in rows]
        row = call_function(graph, aten.cat.default, (rows,))
        sent = send(graph, bucket, row, OPERATORS[CommKind.ALL_GATHER])
        by_rank = [ranks, sizes(graph, row)[0]]
    with graph.inserting_before(first_of(bucket.arrival)):
        parts = reshape(graph, wait_for(graph, bucket, sent), by_rank)
        pieces = split(graph, parts, lengths, dim=1)
        full = [[compute(graph, mul, first, ranks), *rest] for first, *rest in shapes]
        return [reshape(graph, one, shape) for one, shape in zip(pieces, full, strict=True)]


def rewrite_reduce_scatters(graph: fx.Graph, bucket: CommBucket) -> list[fx.Node]:
    """Write one reduce-scatter of a row for a bucket; give the new result for each old one."""
    sources, ranks = bucket.sources, group_size(bucket.last.comm_node)
    with graph.inserting_before(first_of(bucket.departure)):
        shapes = [sizes(graph, one) for one in sources]
        shares = [[compute(graph, floordiv, first, ranks), *rest] for first, *rest in shapes]
        # Not -1, which is ambiguous where there are no elements.
        lengths = [reduce(partial(compute, graph, mul), shape, 1) for shape in shares]
        by_rank = [
            reshape(graph, one, [ranks, length])
            for one, length in zip(sources, lengths, strict=True)
        ]
        row = reshape(graph, call_function(graph, aten.cat.default, (by_rank, 1)), [-1])
        sent = send(graph, bucket, row, OPERATORS[CommKind.REDUCE_SCATTER])
    with graph.inserting_before(first_of(bucket.arrival)):
        pieces = split(graph, wait_for(graph, bucket, sent), lengths)
        return [reshape(graph, one, shape) for one, shape in zip(pieces, shares, strict=True)]
