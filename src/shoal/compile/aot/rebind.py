"""Sizes that depend on data, taken from what has them in forward.

A trace takes a symbolic size from the first value that has it. Gradients are inputs of a joint
graph, so that the size of an output, if it depends on data, may be taken from its gradient, which
comes only after forward.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from torch.fx import Graph, Node

ASK = torch.ops.aten.sym_size.int


def rebind_sizes(graph: Graph, tangents: Collection[Node], forward: str) -> None:
    """Let nodes of the phase `forward` take sizes from nodes of that phase."""
    asked = [
        node
        for node in graph.nodes
        if node.target is ASK and node.args[0] in tangents and node.meta["phase"] == forward
    ]
    for node in asked:
        source, dim = _origin(graph, node, tangents, forward)
        with graph.inserting_after(source):
            size = graph.call_function(ASK, (source, dim))
        size.meta = dict(node.meta)
        node.replace_all_uses_with(size)
        graph.erase_node(node)


def _origin(
    graph: Graph, asked: Node, tangents: Collection[Node], forward: str
) -> tuple[Node, int]:
    """The first value of forward that has a size, if that is before anybody wants it."""
    wanted = str(asked.meta["val"])
    users = set(asked.users)
    for node in graph.nodes:
        if node in users:
            break
        value = node.meta.get("val")
        if node in tangents or node.meta.get("phase") != forward or not isinstance(value, Tensor):
            continue
        for dim, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt) and str(size) == wanted:
                return node, dim
    raise NotImplementedError(
        f"a size that depends on data ({wanted}) is needed in forward before a tensor of that size "
        "is there; this is not supported"
    )
