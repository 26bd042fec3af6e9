"""Rewrite joint graphs that Inductor compiles.

    full(0) ─► scatter(index, -1)     ──►     where(index == 0, 1, 2, …, then -1, else 0)
    clone(x) ─► copy_(y, ·)           ──►     where(True, x, x) ─► copy_(y, ·)

`compare_instead_of_scatter`: the derivative of a cross entropy begins with a constant of which one
element per row is set. Written out it is as large as the logits; a comparison fuses into its
readers. `keep_old_values`: if x is written to afterwards, y must get what x was. Inductor drops
copies that it takes for idle, and then y gets what x became. It does not drop a choice between a
tensor and itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from shoal.compile.node_kinds import NodeKind, kind, value
from shoal.compile.passes.rewrite import call_instead

aten = torch.ops.aten
FILLED = (aten.full.default, aten.full_like.default)


def compare_instead_of_scatter(graph: fx.Graph) -> int:
    """Replace `scatter` of a number into a constant by a comparison; say how many."""
    found = [
        node
        for node in graph.find_nodes(op="call_function", target=aten.scatter.value)
        if _sets_one_per_row(node)
    ]
    for node in found:
        _rewrite(graph, node)
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
    counting = {"start": 0, "step": 1, "requires_grad": False}
    counting |= {"dtype": torch.int64, "device": whole.device}
    length = whole.shape[dim]
    column = [1] * whole.dim()
    column[dim] = length
    counted = call_instead(node, torch.ops.prims.iota.default, (length,), **counting)
    places = call_instead(node, aten.view.default, (counted, column))
    is_set = call_instead(node, aten.eq.Tensor, (index, places))
    one = call_instead(node, aten.full.default, ([], number), **like)
    rest = call_instead(node, aten.full.default, ([], filled.args[1]), **like)
    chosen = call_instead(node, aten.where.self, (is_set, one, rest))
    node.replace_all_uses_with(chosen)
    graph.erase_node(node)
    if not filled.users:
        graph.erase_node(filled)


COPIES: dict[Any, int] = {aten.clone.default: 0, aten.copy.default: 1}
"""The operators that copy a tensor, and the place of the argument that they copy."""


def keep_old_values(graph: fx.Graph) -> int:
    """Replace copies of inputs that are written to, where another input gets them; say how many."""
    writes = graph.find_nodes(op="call_function", target=aten.copy_.default)
    written = {node.args[0] for node in writes}
    found = {copy for node in writes if (copy := _copy_of_any(node, written)) is not None}
    for node in found:
        _choose(graph, node)
    return len(found)


def _copy_of_any(write: fx.Node, written: set[object]) -> fx.Node | None:
    """Where the new value was copied from another of these inputs, if nothing else was done."""
    target, node = write.args[:2]
    copy: fx.Node | None = None
    while isinstance(node, fx.Node) and node.op == "call_function":
        if node.target in COPIES and _is_idle(node):
            copy, node = node, node.args[COPIES[node.target]]
        elif kind(node) is NodeKind.VIEW:
            node = node.all_input_nodes[0]
        else:
            return None
    return copy if node in written and node is not target else None


def _is_idle(copy: fx.Node) -> bool:
    source = copy.args[COPIES[copy.target]]
    return isinstance(source, fx.Node) and value(source).dtype == value(copy).dtype


def _choose(graph: fx.Graph, copy: fx.Node) -> None:
    source = copy.args[COPIES[copy.target]]
    assert isinstance(source, fx.Node)
    held = value(copy)
    like = {"dtype": torch.bool, "device": held.device}
    yes = call_instead(copy, aten.full.default, ([], True), **like)
    chosen = call_instead(copy, aten.where.self, (yes, source, source))
    widened = call_instead(copy, aten.expand.default, (chosen, list(held.shape)))
    copy.replace_all_uses_with(widened)
    graph.erase_node(copy)
