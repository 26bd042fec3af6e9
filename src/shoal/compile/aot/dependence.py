"""Which of the gradients that come in, each gradient that goes out depends on.

Autograd leaves out gradients that nothing flows into; a graph computes all of its gradients at
once. With this, those that would be of zeros alone can be left out too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, Node

from shoal.compile.aot.subclasses import Wrappings, places


def dependence_of(
    graph: Graph, tangents: Sequence[object], wrappings: Wrappings
) -> tuple[frozenset[int], ...]:
    """For each gradient of a backward graph, the tangents it depends on, by their numbers.

    Of `tangents`, the parts of all tangents, the graph takes those that are not None, last.
    """
    nodes = list(graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    numbers = [
        number
        for number, place in enumerate(places(wrappings.tangents, symbols=False))
        for at in place
        if tangents[at] is not None
    ]
    taken = inputs[len(inputs) - len(numbers) :]
    found: dict[Node, frozenset[int]] = {
        node: frozenset((number,)) for node, number in zip(taken, numbers, strict=True)
    }
    for node in nodes:
        if node not in found:
            found[node] = frozenset().union(*(found[one] for one in node.all_input_nodes))
    results: list[Any] = list(nodes[-1].args[0])  # type: ignore[arg-type]
    return tuple(
        frozenset().union(*(found[results[at]] for at in place if isinstance(results[at], Node)))
        for place in places(wrappings.gradients)
    )
