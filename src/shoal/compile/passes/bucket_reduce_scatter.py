"""Several reduce-scatters made one: of CUDA tensors by one launch, of others in one row.

    rank 0    a0 a1, b0 b1 ┐                            ┌ a0, b0   what goes to one rank must lie in
    rank 1    a0 a1, b0 b1 ┴─► a0 b0 | a1 b1  reduced ─►└ a1, b1   one piece, so members interleave

Each element goes to the same rank as before. Backends whose order of summing depends on where in a
buffer an element lies (gloo, on more than two ranks) may round it differently.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shoal.compile.passes.bucket import Bucket, Limits
from shoal.compile.passes.bucket_all_gather import match_by_rank
from shoal.compile.passes.coalesce import together_or
from shoal.compile.passes.collectives import CommKind, group_size, variant
from shoal.compile.passes.fuse import arrival, departure, fuse
from shoal.compile.passes.rewrite import call_again, call_function, share, sizes, split, times

aten = torch.ops.aten


def bucket_reduce_scatters(
    graph: fx.Graph, limits: Limits, *, together: bool | None = None
) -> list[Bucket]:
    """Make one reduce-scatter of those with equal keys; `together`, by one launch."""
    name = "reduce_scatter_tensor_coalesced"
    rewrite = together_or(name, rewrite_reduce_scatters, together=together)
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
