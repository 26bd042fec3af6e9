"""Copies of inputs that are written to, kept as copies.

    clone(x) ─► copy_(y, ·),  copy_(x, new)        y gets what x was

Inductor drops copies that it takes for idle, and then y gets what x became. A choice between a
tensor and itself it does not drop.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shoal.compile.partition.ops import Kind, kind, value
from shoal.compile.passes.metadata import compute_metadata

aten = torch.ops.aten
COPIES: dict[Any, int] = {aten.clone.default: 0, aten.copy.default: 1}
"""What gives elements as they are in other memory, and where it takes them from."""


def keep_old_values(graph: fx.Graph) -> int:
    """Replace copies of inputs that are written to, and that others are written with; how many."""
    writes = graph.find_nodes(op="call_function", target=aten.copy_.default)
    written = {node.args[0] for node in writes}
    found = {copy for node in writes if (copy := _copy_of_any(node, written)) is not None}
    for node in found:
        _choose(graph, node)
    if found:
        graph.lint()
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
