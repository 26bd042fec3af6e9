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

from typing import Any

import torch
from torch import fx

from shoal.comm.buckets import Limits
from shoal.compile.node_kinds import is_tensor, value
from shoal.compile.passes.bucket import Bucket, Member
from shoal.compile.passes.collectives import CommKind, collective, group_size, variant
from shoal.compile.passes.comm_block import CommBlock, get_all_comm_blocks
from shoal.compile.passes.fuse import arrival, as_launch_or_row, departure, fuse
from shoal.compile.passes.rewrite import call_again, call_function, share, sizes, split, times

aten = torch.ops.aten


def bucket_all_gathers(
    graph: fx.Graph, limits: Limits, *, together: bool | None = None
) -> list[Bucket]:
    """Make one all-gather of those with equal keys; `together`, by one launch without copies."""
    name = "all_gather_into_tensor_coalesced"
    rewrite = as_launch_or_row(name, rewrite_all_gathers, together=together)
    return fuse(graph, match_by_rank(graph, CommKind.ALL_GATHER), limits, rewrite)


def match_by_rank(graph: fx.Graph, kind: CommKind) -> list[Member]:
    """The collectives of a kind that work along the first dimension of one tensor for each wait."""
    return [
        Member(block=block, key=(block.key, group_size(block.comm_node)))
        for block in get_all_comm_blocks(graph)
        if block.key.kind is kind and _is_by_rank(block)
    ]


def rewrite_all_gathers(graph: fx.Graph, bucket: Bucket) -> list[fx.Node]:
    """Write one all-gather of a row for a bucket; give the new result for each old one."""
    sources = [node for member in bucket for node in member.sources]
    last = bucket[-1].block
    ranks = group_size(last.comm_node)
    with graph.inserting_before(departure(bucket)):
        shapes = [sizes(graph, one) for one in sources]
        rows = [call_function(graph, aten.reshape.default, (one, [-1])) for one in sources]
        lengths = [sizes(graph, row)[0] for row in rows]
        row = call_function(graph, aten.cat.default, (rows,))
        gather = variant(last.comm_node, "all_gather_into_tensor")
        comm = call_again(graph, last.comm_node, row, gather)
        by_rank = [ranks, sizes(graph, row)[0]]
    with graph.inserting_before(arrival(bucket)):
        wait = call_again(graph, last.wait_nodes[0], comm)
        parts = call_function(graph, aten.reshape.default, (wait, by_rank))
        pieces = split(graph, parts, lengths, dim=1)
        full = [[times(graph, first, ranks), *rest] for first, *rest in shapes]
        return [
            call_function(graph, aten.reshape.default, (piece, shape))
            for piece, shape in zip(pieces, full, strict=True)
        ]


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


def bucket_reduce_scatters(
    graph: fx.Graph, limits: Limits, *, together: bool | None = None
) -> list[Bucket]:
    """Make one reduce-scatter of those with equal keys; `together`, by one launch."""
    name = "reduce_scatter_tensor_coalesced"
    rewrite = as_launch_or_row(name, rewrite_reduce_scatters, together=together)
    return fuse(graph, match_by_rank(graph, CommKind.REDUCE_SCATTER), limits, rewrite)


def rewrite_reduce_scatters(graph: fx.Graph, bucket: Bucket) -> list[fx.Node]:
    """Write one reduce-scatter of a row for a bucket; give the new result for each old one."""
    sources = [node for member in bucket for node in member.sources]
    last = bucket[-1].block
    ranks = group_size(last.comm_node)
    with graph.inserting_before(departure(bucket)):
        shares = [
            [share(graph, first, ranks), *rest]
            for first, *rest in (sizes(graph, one) for one in sources)
        ]
        lengths = [_numel(graph, one) for one in shares]
        by_rank = [
            call_function(graph, aten.reshape.default, (one, [ranks, length]))
            for one, length in zip(sources, lengths, strict=True)
        ]
        joined = call_function(graph, aten.cat.default, (by_rank, 1))
        row = call_function(graph, aten.reshape.default, (joined, [-1]))
        scatter = variant(last.comm_node, "reduce_scatter_tensor")
        comm = call_again(graph, last.comm_node, row, scatter)
    with graph.inserting_before(arrival(bucket)):
        wait = call_again(graph, last.wait_nodes[0], comm)
        pieces = split(graph, wait, lengths)
        return [
            call_function(graph, aten.reshape.default, (piece, shape))
            for piece, shape in zip(pieces, shares, strict=True)
        ]


def _numel(graph: fx.Graph, shape: list[Any]) -> Any:
    """The elements of a shape; not -1, which is ambiguous where there are none."""
    numel: Any = 1
    for size in shape:
        numel = times(graph, numel, size)
    return numel
