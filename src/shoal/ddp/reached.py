"""Which parameters a backward from some outputs comes to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor


def reached(outputs: Sequence[Tensor], numbers: Mapping[Tensor, int]) -> Iterator[int]:
    """The numbers of the parameters in the graph of some outputs, each as it is found.

    The first is near the outputs, as a rule. What a reentrant checkpoint recomputes is not in the
    graph yet.
    """
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
            yield number
        queue.extend(next_node for next_node, _ in node.next_functions if next_node is not None)
