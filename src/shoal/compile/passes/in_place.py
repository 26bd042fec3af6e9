"""Rows of gradients scaled and averaged where they lie.

    cat ─► div ─► all_reduce ─► wait        three times the memory of a bucket
    cat ─► div_ ─► all_reduce_ ─► wait      once

For graphs whose operators are called one by one: compilers that plan memory do it by themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shoal.compile.node_kinds import is_tensor, op_name, value
from shoal.compile.passes.bucket_all_reduce import FOREACH, scaling
from shoal.compile.passes.collectives import variant
from shoal.compile.passes.comm_block import get_all_comm_blocks

aten = torch.ops.aten
ALL_REDUCE = "_c10d_functional::all_reduce"
SCALED_IN_PLACE: dict[Any, Any] = {
    aten.div.Tensor: aten.div_.Tensor,
    aten.div.Scalar: aten.div_.Scalar,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.mul.Scalar: aten.mul_.Scalar,
}
NEW = frozenset({aten.cat.default, aten._to_copy.default, *FOREACH, *SCALED_IN_PLACE.values()})
"""What gives memory that nothing else knows of, or memory that it alone was given to write to."""


def average_in_place(graph: fx.Graph) -> int:
    """Write results of all-reduces, and of scalings before them, over what they are made of.

    Only where that is new memory that nobody else reads. Says how many were written over.
    """
    count = 0
    for block in get_all_comm_blocks(graph):
        sent = block.inputs[0]
        if op_name(block.comm_node) == ALL_REDUCE and _is_own(sent):
            count += 1 + _scale_in_place(sent)
            block.comm_node.target = variant(block.comm_node, "all_reduce_")
    graph.lint()
    return count


def _scale_in_place(node: fx.Node) -> int:
    """Let a scaling write over what it scales, if that is nobody else's and as wide."""
    if node.target not in SCALED_IN_PLACE or scaling(node) is None:
        return 0
    (scaled, *_) = node.all_input_nodes
    if not _is_own(scaled) or value(scaled).dtype != value(node).dtype:
        return 0
    node.target = SCALED_IN_PLACE[node.target]
    return 1


def _is_own(node: fx.Node) -> bool:
    """Whether a node gives a tensor, without gaps, in memory that only one node reads."""
    is_new = is_tensor(node) and node.target in NEW and len(node.users) == 1
    return is_new and value(node).is_contiguous()
