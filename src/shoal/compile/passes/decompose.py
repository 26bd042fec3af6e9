"""Decompose native_dropout_backward on CPU into two multiplications.

    native_dropout_backward(grad, mask, scale)      ──►      mul_(mul(grad, mask), scale)

For graphs whose operators are called one by one: the operator itself goes through more of torch
before it calls the two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from shoal.compile.node_kinds import value
from shoal.compile.passes.rewrite import call_instead

aten = torch.ops.aten


def decompose_dropout_backward(graph: fx.Graph) -> int:
    """Replace each `native_dropout_backward` on CPU by `mul` and `mul_`; say how many."""
    found = [
        node
        for node in graph.find_nodes(
            op="call_function", target=aten.native_dropout_backward.default
        )
        if _is_plain(value(node.args[1]))  # type: ignore[arg-type]
    ]
    for node in found:
        grad, mask, scale = node.args
        kept = call_instead(node, aten.mul.Tensor, (grad, mask))
        node.replace_all_uses_with(call_instead(node, aten.mul_.Tensor, (kept, scale)))
        graph.erase_node(node)
    return len(found)


def _is_plain(mask: Any) -> bool:
    is_mask = isinstance(mask, Tensor) and mask.dtype is torch.bool
    return is_mask and mask.device.type == "cpu"
