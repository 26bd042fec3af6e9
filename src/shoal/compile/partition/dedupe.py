"""Equal work done once: common subexpressions of one phase."""

from __future__ import annotations

from typing import Any

from torch import fx

from shoal.compile.partition.joint import PINNED, output_of, phase
from shoal.compile.partition.mutation import storages
from shoal.compile.partition.ops import Kind, kind

UNTOUCHED = PINNED | {Kind.INPUT, Kind.CONSTANT}


def drop_repeated(graph: fx.Graph) -> None:
    """Let readers of equal values read the first of them.

    Forward and backward stay apart: what backward computes again, it was asked to. What is
    returned stays apart too: two results must not become one tensor.
    """
    returned = storages(output_of(graph).all_input_nodes)
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or kind(node) in UNTOUCHED or node.is_impure():
            continue
        if storages([node]) & returned:
            continue
        key = _key(node)
        if key is None:
            continue
        known = first.setdefault(key, node)
        if known is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)


def _key(node: fx.Node) -> Any:
    """What makes two nodes equal; None where that cannot be told."""
    tags = (node.meta.get("recompute"), node.meta.get("ac_graph_id"))
    key = (phase(node), node.target, tags, _frozen(node.args), _frozen(dict(node.kwargs)))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _frozen(given: Any) -> Any:
    if isinstance(given, list | tuple):
        return (type(given).__name__, *map(_frozen, given))
    if isinstance(given, dict):
        return tuple((name, _frozen(one)) for name, one in sorted(given.items()))
    if isinstance(given, slice):
        return ("slice", *map(_frozen, (given.start, given.stop, given.step)))
    return (type(given), repr(given) if isinstance(given, float) else given)
