"""Gradients that lie in the memory of others: autograd takes each for one of its own.

It keeps what a backward returns for a leaf, and adds later gradients to it in place.
"""

from __future__ import annotations

from torch import Tensor
from torch.fx import Graph, Node

from shoal._torch import storage, symbols
from shoal.compile.aot.arrange import meet


def not_apart(graph: Graph) -> tuple[int, ...]:
    """Which of the gradients that a backward graph returns have elements of an earlier one."""
    found: list[int] = []
    kept: dict[int, list[Node]] = {}
    for at, node in enumerate(graph.output_node().args[0]):  # type: ignore[arg-type]
        held = node.meta.get("val") if isinstance(node, Node) else None
        if not isinstance(held, Tensor) or (key := storage.storage_key(held)) is None:
            continue
        earlier = kept.setdefault(key, [])
        # One tensor returned twice is copied by autograd itself.
        if node not in earlier and any(_meet(one.meta["val"], held) for one in earlier):
            found.append(at)
        else:
            earlier.append(node)
    return tuple(found)


def _meet(one: Tensor, two: Tensor) -> bool:
    """Whether they have elements in common, or may have: sizes that are open are not asked for."""
    return bool(symbols.symbols_in(one) or symbols.symbols_in(two)) or meet(one, two)
