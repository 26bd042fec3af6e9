"""Symbolic sizes: their hints, the nodes that bring them into a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import symbolic_shapes

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


UNKNOWN_SIZE = 4096
"""Taken for a symbolic size that nothing is known of: it depends on data."""


def size_hint(size: Any) -> int:
    """The value that a symbolic integer had when it was traced, without a guard on it."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    hint_of = getattr(symbolic_shapes, "optimization_hint", None)  # since 2.13
    if hint_of is not None:
        return int(hint_of(size, fallback=UNKNOWN_SIZE))
    hint = size.node.hint if size.node.has_hint() else None
    return hint if isinstance(hint, int) else UNKNOWN_SIZE


def num_bytes(tensor: Tensor) -> int:
    """The bytes of a tensor's elements, with hints for symbolic sizes."""
    numel = 1
    for size in tensor.shape:
        numel *= size_hint(size)
    return numel * tensor.element_size()


def known_number(value: Any) -> float | None:
    """What a symbolic number has been found to be in all calls of a graph; None if it is open."""
    expression = value.node.expr
    return float(expression) if expression.is_number else None


def symbol_bindings(graph: torch.fx.Graph) -> dict[Any, torch.fx.Node]:
    """The node that first brings each symbol of a graph in."""
    return symbolic_shapes.find_symbol_binding_fx_nodes(graph)


def bound_symbol(node: torch.fx.Node) -> Any:
    """The symbol that a node brings in, if it does."""
    return symbolic_shapes.is_symbol_binding_fx_node(node)


def symbols_in(value: Any) -> list[Any]:
    """The symbols in the shape of a value, by name."""
    if not isinstance(value, (Tensor, *SYMBOLIC)):
        return []
    return sorted(symbolic_shapes.free_symbols(value), key=str)
