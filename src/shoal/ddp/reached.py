"""Which parameters a backward from some outputs comes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def reached(outputs: Sequence[Tensor], numbers: Mapping[Tensor, int]) -> set[int]:
    """The numbers of the parameters in the graph of some outputs.

    What a reentrant checkpoint recomputes is not in the graph yet.
    """
    found: set[int] = set()
    seen: set[Any] = set()
    queue: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        parameter = getattr(node, "variable", None)
        number = None if parameter is None else numbers.get(parameter)
        if number is not None:
            found.add(number)
        queue.extend(next_node for next_node, _ in node.next_functions if next_node is not None)
    return found
