"""Bucket all-reduces: as one row of elements, or as a list. A common scaling is done once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shoal.comm.buckets import Limits
from shoal.compile.node_kinds import Kind, is_tensor, kind, value
from shoal.compile.passes.bucket import Bucket, Member
from shoal.compile.passes.collectives import CommKind, collective, variant
from shoal.compile.passes.comm_block import CommBlock, get_all_comm_blocks
from shoal.compile.passes.fuse import arrival, departure, fuse, launch_together
from shoal.compile.passes.rewrite import call_again, call_function, flatten, sizes, split, unflatten

aten = torch.ops.aten


def bucket_all_reduces(graph: fx.Graph, limits: Limits) -> list[Bucket]:
    """Make one all-reduce of those with equal keys."""
    return fuse(graph, match_all_reduces(graph), limits, rewrite_as_row)


def match_all_reduces(graph: fx.Graph) -> list[Member]:
    """The all-reduces of a graph that can become part of another one."""
    members = (all_reduce_member(block) for block in get_all_comm_blocks(graph))
    return [member for member in members if member is not None]


def all_reduce_member(block: CommBlock) -> Member | None:
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
    return Member(
        block=block,
        key=(block.key, block.comm_node.target, common),
        absorbed=() if common is None else block.inputs,
    )


def rewrite_as_row(graph: fx.Graph, bucket: Bucket) -> list[fx.Node]:
    """Write one all-reduce of one row of elements; give the new result for each old one."""
    sources, waits, common = _parts(bucket)
    last = bucket[-1].block.comm_node
    with graph.inserting_before(departure(bucket)):
        rows = [flatten(graph, one, like) for one, like in zip(sources, waits, strict=True)]
        lengths = [sizes(graph, row)[0] for row in rows]
        shapes = [sizes(graph, one) for one in sources]
        row = call_function(graph, aten.cat.default, (rows,))
        if common is not None:
            row = common.of(graph, row)
        comm = call_again(graph, last, row, _variant(last))
    with graph.inserting_before(arrival(bucket)):
        pieces = split(graph, call_again(graph, waits[-1], comm), lengths)
        return [
            unflatten(graph, piece, shape, like)
            for piece, shape, like in zip(pieces, shapes, waits, strict=True)
        ]


def rewrite_as_list(graph: fx.Graph, bucket: Bucket) -> list[fx.Node]:
    """Write one all-reduce of a list; give the new result for each old one."""
    sources, _, common = _parts(bucket)
    with graph.inserting_before(departure(bucket)):
        given = sources if common is None else common.of_each(graph, sources)
    op = _variant(bucket[-1].block.comm_node, "_coalesced")
    return launch_together(graph, bucket, op, given)


def _parts(bucket: Bucket) -> tuple[list[fx.Node], list[fx.Node], Scaling | None]:
    """What goes in, the waits for what comes out, and the scaling that all members share."""
    sources = [node for member in bucket for node in member.sources]
    waits = [node for member in bucket for node in member.block.wait_nodes]
    absorbed = bucket[0].absorbed
    return sources, waits, scaling(absorbed[0]) if absorbed else None


def _variant(comm_node: fx.Node, of: str = "") -> Any:
    """The operator for one row or for a list, in place where the node's is."""
    op = collective(comm_node)
    in_place = "_" if op is not None and op.writes else ""
    return variant(comm_node, f"all_reduce{of}{in_place}")


def _is_private(node: fx.Node) -> bool:
    """Whether a node's result lies in memory of its own that one node alone reads."""
    own = kind(node) not in (Kind.INPUT, Kind.CONSTANT, Kind.VIEW, Kind.ITEM, Kind.MUTATION)
    return own and len(node.users) == 1


FOREACH = {
    aten.div.Tensor: (aten._foreach_div.Scalar, aten._foreach_div.Tensor),
    aten.div.Scalar: (aten._foreach_div.Scalar, aten._foreach_div.Tensor),
    aten.mul.Tensor: (aten._foreach_mul.Scalar, aten._foreach_mul.Tensor),
    aten.mul.Scalar: (aten._foreach_mul.Scalar, aten._foreach_mul.Tensor),
}
"""What does the same to a list, by a number or by a tensor of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """What is done to each element."""

    target: Any
    factor: Any
    """A number, or the node of a tensor of one."""
    dtype: torch.dtype
    """Of what is scaled: integers become floats."""

    def of(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        """A new node that scales a tensor."""
        return call_function(graph, self.target, (node, self.factor))

    def of_each(self, graph: fx.Graph, nodes: list[fx.Node]) -> fx.Node:
        """A new node that scales several tensors."""
        by_number, by_tensor = FOREACH[self.target]
        target = by_tensor if isinstance(self.factor, fx.Node) else by_number
        return call_function(graph, target, (nodes, self.factor))


def scaling(node: fx.Node) -> Scaling | None:
    """What a node does, if it scales."""
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
