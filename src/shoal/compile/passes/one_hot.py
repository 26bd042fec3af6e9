"""A constant with one element per row set, as a comparison: it fuses into what reads it.

full(0) ─► scatter(index, -1)        ──►        where(index == 0, 1, 2, …, then -1, else 0)

The derivative of a cross entropy begins so. Written out it is as large as the logits. For
compilers that fuse: where operators run one by one, it would be more of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from shoal.compile.partition.ops import value

aten = torch.ops.aten
FILLED = (aten.full.default, aten.full_like.default)


def compare_instead_of_scatter(graph: fx.Graph) -> int:
    """Replace scatters of a number into constants; say how many."""
    found = [
        node
        for node in graph.find_nodes(op="call_function", target=aten.scatter.value)
        if _sets_one_per_row(node)
    ]
    for node in found:
        _rewrite(graph, node)
    if found:
        graph.lint()
    return len(found)


def _sets_one_per_row(node: fx.Node) -> bool:
    filled, index = node.args[0], node.args[2]
    if not (isinstance(filled, fx.Node) and isinstance(index, fx.Node)):
        return False
    if filled.target not in FILLED or not isinstance(filled.args[1], int | float | bool):
        return False
    whole, rows, dim = value(filled), value(index), node.args[1]
    if not isinstance(whole, Tensor) or not isinstance(rows, Tensor) or not whole.dim():
        return False
    assert isinstance(dim, int)
    if not all(isinstance(size, int) for size in whole.shape):
        return False
    shape = list(whole.shape)
    shape[dim] = 1
    return rows.dtype is torch.int64 and list(rows.shape) == shape


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    filled, dim, index, number = node.args
    assert isinstance(filled, fx.Node)
    assert isinstance(index, fx.Node)
    assert isinstance(dim, int)
    whole = value(node)
    like = {"dtype": whole.dtype, "device": whole.device}
    counting = {"start": 0, "step": 1, "dtype": torch.int64, "requires_grad": False}
    counting["device"] = whole.device
    column = [1] * whole.dim()
    column[dim] = whole.shape[dim]
    with graph.inserting_before(node):
        counted = _call(node, torch.ops.prims.iota.default, (whole.shape[dim],), **counting)
        places = _call(node, aten.view.default, (counted, column))
        is_set = _call(node, aten.eq.Tensor, (index, places))
        one = _call(node, aten.full.default, ([], number), **like)
        rest = _call(node, aten.full.default, ([], filled.args[1]), **like)
        chosen = _call(node, aten.where.self, (is_set, one, rest))
    node.replace_all_uses_with(chosen)
    graph.erase_node(node)
    if not filled.users:
        graph.erase_node(filled)


def _call(instead: fx.Node, op: Any, args: tuple[Any, ...], **named: Any) -> fx.Node:
    """A node with its value, said to be where the one was that it helps to replace."""
    made = instead.graph.call_function(op, args, named)
    made.meta = {key: one for key, one in instead.meta.items() if key != "tensor_meta"}
    values: Any = fx.map_arg(args, value)  # type: ignore[misc]
    with value(instead).fake_mode:
        made.meta["val"] = op(*values, **named)
    return made
