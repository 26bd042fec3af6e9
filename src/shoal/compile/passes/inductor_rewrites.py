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

from shoal.compile.node_kinds import Kind, kind, value
from shoal.compile.passes.metadata import compute_metadata

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


COPIES: dict[Any, int] = {aten.clone.default: 0, aten.copy.default: 1}
"""What gives elements as they are in other memory, and where it takes them from."""


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
        elif kind(node) is Kind.VIEW:
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
    with graph.inserting_before(copy):
        yes = graph.call_function(
            aten.full.default, ([], True), {"dtype": torch.bool, "device": held.device}
        )
        chosen = graph.call_function(aten.where.self, (yes, source, source))
        widened = graph.call_function(aten.expand.default, (chosen, list(held.shape)))
    for node in (yes, chosen, widened):
        node.meta.update({name: one for name, one in copy.meta.items() if name != "val"})
        compute_metadata(node)
    copy.replace_all_uses_with(widened)
    graph.erase_node(copy)
