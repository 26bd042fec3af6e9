"""What the metadata of a graph says, computed again and compared."""

from __future__ import annotations

from typing import Any

from torch import fx

from shoal._torch import traces
from shoal.compile.passes.reading import Reading
from shoal.errors import InvariantError


def compute_metadata(node: fx.Node) -> None:
    """Write down what a node gives: `val`, a value without elements, and `tensor_meta`."""
    node.meta["val"] = result_of(node)
    node.meta["tensor_meta"] = traces.tensor_metadata(node.meta["val"])


def result_of(node: fx.Node) -> Any:
    """What a node gives, computed without elements from the metadata of what it is given."""
    return Reading.of(node).result()


def inconsistencies(graph: fx.Graph) -> dict[fx.Node, str]:
    """The nodes whose metadata says something else than what they would give, and what."""
    found = {node: Reading.of(node).complaint() for node in graph.nodes}
    return {node: what for node, what in found.items() if what is not None}


def check_graph(graph: fx.Graph, known: dict[fx.Node, str] | None = None) -> None:
    """Raise unless each node stands after what it reads, and says what it gives.

    `known` are inconsistencies that were there before.
    """
    graph.lint()
    _raise_if([what for node, what in inconsistencies(graph).items() if node not in (known or {})])


class Watched:
    """A graph that passes change: only what they touched is computed again.

    What was wrong before the first of them is no fault of theirs.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._first = {node: Reading.of(node) for node in graph.nodes}
        self._last = self._first

    def check(self) -> None:
        """Raise unless what changed since the last time says what it gives."""
        now = {node: Reading.of(node) for node in self._graph.nodes}
        wrong: list[str] = []
        for node, reading in now.items():
            before = self._last.get(node)
            if before is not None and reading.is_like(before):
                continue
            what = reading.complaint()
            if what is not None and not self._was_wrong(node):
                wrong.append(what)
        _raise_if(wrong)
        self._last = now

    def _was_wrong(self, node: fx.Node) -> bool:
        first = self._first.get(node)
        return first is not None and first.complaint() is not None


def _raise_if(wrong: list[str]) -> None:
    if wrong:
        raise InvariantError(
            f"the metadata of {len(wrong)} nodes is wrong after a pass; first: {wrong[0]}"
        )
