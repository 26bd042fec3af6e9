"""Gradients divided by the number of ranks: a node that multiplies or divides by one number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shoal.compile.partition.ops import is_tensor, value
from shoal.compile.passes.rewrite import call_function

aten = torch.ops.aten
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
