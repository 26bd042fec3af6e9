"""Bucket all-reduces: as one row of elements, or as a list. A common scaling is done once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shoal.comm.buckets import Limits
from shoal.comm.collectives import Kind as CommKind
from shoal.compile.node_kinds import NodeKind, is_tensor, kind, value
from shoal.compile.passes.bucket import BucketMember, CommBucket
from shoal.compile.passes.collectives import collective
from shoal.compile.passes.comm_block import CommBlock, get_all_comm_blocks
from shoal.compile.passes.fuse import first_of, fuse, launch_together, send, wait_for
from shoal.compile.passes.rewrite import call_function, flatten, sizes, split, unflatten

aten = torch.ops.aten


def bucket_all_reduces(graph: fx.Graph, limits: Limits) -> list[CommBucket]:
    """Make one all-reduce of those with equal keys."""
    return fuse(graph, match_all_reduces(graph), limits, rewrite_as_row)


def match_all_reduces(graph: fx.Graph) -> list[BucketMember]:
    """The all-reduces of a graph that can become part of another one."""
    return list(filter(None, map(_member, get_all_comm_blocks(graph))))


def _member(block: CommBlock) -> BucketMember | None:
    """An all-reduce as part of a bucket, with the scaling before it if that serves nothing else."""
    if block.key.kind is not CommKind.ALL_REDUCE or block.key.dtype is None:
        return None
    if not all(map(is_tensor, block.inputs)) or len(block.inputs) != len(block.wait_nodes):
        return None
    op = collective(block.comm_node)
    assert op is not None
    if op.writes and not all(_is_private(node) for node in block.inputs):
        return None
    scalings = [scaling(node) if len(node.users) == 1 else None for node in block.inputs]
    common = scalings[0] if len(set(scalings)) == 1 else None
    return BucketMember(
        block=block,
        key=(block.key, block.comm_node.target, common),
        absorbed=() if common is None else block.inputs,
    )


def rewrite_as_row(graph: fx.Graph, bucket: CommBucket) -> list[fx.Node]:
    """Write one all-reduce of one row of elements; give the new result for each old one."""
    sources, waits, common = bucket.sources, bucket.waits, _common_scaling(bucket)
    with graph.inserting_before(first_of(bucket.departure)):
        rows = [flatten(graph, one, like) for one, like in zip(sources, waits, strict=True)]
        lengths = [sizes(graph, row)[0] for row in rows]
        shapes = [sizes(graph, one) for one in sources]
        row = call_function(graph, aten.cat.default, (rows,))
        if common is not None:
            row = call_function(graph, common.target, (row, common.factor))
        sent = send(graph, bucket, row, f"all_reduce{_in_place(bucket)}")
    with graph.inserting_before(first_of(bucket.arrival)):
        pieces = split(graph, wait_for(graph, bucket, sent), lengths)
        return [
            unflatten(graph, piece, shape, like)
            for piece, shape, like in zip(pieces, shapes, waits, strict=True)
        ]


def rewrite_as_list(graph: fx.Graph, bucket: CommBucket) -> list[fx.Node]:
    """Write one all-reduce of a list; give the new result for each old one."""
    given, common = bucket.sources, _common_scaling(bucket)
    if common is not None:
        by_number, by_tensor = FOREACH[common.target]
        target = by_tensor if isinstance(common.factor, fx.Node) else by_number
        with graph.inserting_before(first_of(bucket.departure)):
            given = call_function(graph, target, (given, common.factor))
    return launch_together(graph, bucket, given, f"all_reduce_coalesced{_in_place(bucket)}")


def _common_scaling(bucket: CommBucket) -> Scaling | None:
    """The scaling that all members share, which the bucket does once."""
    absorbed = bucket[0].absorbed
    return scaling(absorbed[0]) if absorbed else None


def _in_place(bucket: CommBucket) -> str:
    """How the name of the operator ends: with `_` if the members' collectives are in place."""
    op = collective(bucket.last.comm_node)
    return "_" if op is not None and op.writes else ""


SHARED = frozenset(
    {NodeKind.INPUT, NodeKind.CONSTANT, NodeKind.VIEW, NodeKind.ITEM, NodeKind.MUTATION}
)
"""The kinds of nodes whose results may lie in memory that other nodes know."""


def _is_private(node: fx.Node) -> bool:
    """Whether a node's result lies in memory of its own that one node alone reads."""
    return kind(node) not in SHARED and len(node.users) == 1


FOREACH = {
    aten.div.Tensor: (aten._foreach_div.Scalar, aten._foreach_div.Tensor),
    aten.div.Scalar: (aten._foreach_div.Scalar, aten._foreach_div.Tensor),
    aten.mul.Tensor: (aten._foreach_mul.Scalar, aten._foreach_mul.Tensor),
    aten.mul.Scalar: (aten._foreach_mul.Scalar, aten._foreach_mul.Tensor),
}
"""The operators that scale a list of tensors: by a number, and by a tensor of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """A multiplication or division of each element."""

    target: Any
    factor: Any
    """A number, or the node of a tensor of one."""
    dtype: torch.dtype
    """Of the tensor before it is scaled: integers become floats."""


def scaling(node: fx.Node) -> Scaling | None:
    """The scaling that a node computes; None if it does something else."""
    if node.target not in FOREACH or len(node.args) != 2 or node.kwargs:
        return None
    scaled, factor = node.args
    if not isinstance(scaled, fx.Node) or not is_tensor(scaled) or not is_tensor(node):
        return None
    if isinstance(factor, fx.Node):
        # Two tensors of one promote to the wider type, a row and a tensor of one to the row's.
        same = value(scaled).dtype == value(node).dtype
        if not is_tensor(factor) or value(factor).dim() or not same:
            return None
    if value(scaled).shape != value(node).shape:
        return None
    return Scaling(target=node.target, factor=factor, dtype=value(scaled).dtype)
