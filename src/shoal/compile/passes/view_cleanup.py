"""Drop views that show what their source shows: each costs a call where operators run one by one.

weight ─► t ─► t ─► mm      ──►      weight ─► mm
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from shoal.compile.node_kinds import NodeKind, flat, kind, op_name, value
from shoal.compile.passes.metadata import compute_metadata

aten = torch.ops.aten

MAY_COPY = frozenset({"aten::reshape", "aten::flatten", "aten::contiguous", "aten::to"})
"""The operators that return their input if it fits already, and a copy otherwise."""


def drop_idle_views(graph: fx.Graph, *, also_returned: bool = False) -> int:
    """Read the source of an idle view in its place; say how many nodes went.

    A view that the graph returns stays, unless `also_returned`: the caller may tell a view from its
    base.
    """
    before = len(graph.nodes)
    for node in list(graph.nodes):
        _drop_dims_in_sum(node)
    returned = set() if also_returned else set(graph.output_node().all_input_nodes)
    for node in list(graph.nodes):
        source = None if node in returned else _same_elements(node)
        if source is not None:
            node.replace_all_uses_with(source)
    for node in reversed(list(graph.nodes)):
        if not node.users and (_is_pure_view(node) or op_name(node) in MAY_COPY):
            graph.erase_node(node)
    graph.lint()
    return before - len(graph.nodes)


def _drop_dims_in_sum(node: fx.Node) -> None:
    """Let a sum drop the dimensions that it sums over, where a view after it does only that.

    The derivative of a bias is such a sum.
    """
    if node.target is not aten.sum.dim_IntList or len(node.args) != 3 or len(node.users) != 1:
        return
    (user,), (_, dims, keeps) = node.users, node.args
    if user.target is not aten.view.default or not keeps or not isinstance(dims, list | tuple):
        return
    shape, seen = value(node).shape, value(user).shape
    if not dims or not all(isinstance(one, int) for one in (*shape, *seen)):
        return
    summed = {int(dim) % len(shape) for dim in dims}  # pyright: ignore[reportArgumentType]
    if [size for dim, size in enumerate(shape) if dim not in summed] == list(seen):
        node.args = node.args[:2]
        compute_metadata(node)
        user.replace_all_uses_with(node)


def _same_elements(node: fx.Node) -> fx.Node | None:
    """The nearest node before a chain of views that shows memory in the same way."""
    elements = _elements(node)
    # That operator asks for more than places in memory: whether there is a gradient.
    asked = any(user.target is aten.as_strided_scatter.default for user in node.users)
    if elements is None or asked:
        return None
    for source in _sources(node):
        if _elements(source) == elements:
            return source
    return None


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that a view shows, directly and through other views."""
    if op_name(node) in MAY_COPY:
        yield from node.all_input_nodes[:1]  # not through it: beyond, it may be a copy of something
        return
    while _is_pure_view(node):
        node = node.all_input_nodes[0]
        yield node


def _is_pure_view(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and kind(node) is NodeKind.VIEW
        and op_name(node) not in MAY_COPY
        and len(node.all_input_nodes) == 1
    )


def _elements(node: fx.Node) -> tuple[Any, ...] | None:
    """The elements of memory that a node's tensor shows, and their dtype; None if not fixed."""
    held = value(node)
    if not isinstance(held, Tensor) or type(held).__name__ != "FakeTensor":
        return None
    place = (*held.shape, *held.stride(), held.storage_offset())
    if not all(isinstance(one, int) for one in flat(list(place))):
        return None
    return (held.dtype, held.device, held.dim(), *place, held.is_conj(), held.is_neg())
