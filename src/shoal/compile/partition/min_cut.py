"""The cheapest set of values to keep: a minimum cut, on plain numbers.

A node computes a value of others' values. Forward computes every node that it is asked for, and
keeps some values; backward starts from those that were kept and computes the rest of what it
needs again. In the network each node is an edge, as wide as its value is costly to keep:

    source ─∞─▶ in ──cost──▶ out ─∞─▶ in of every reader ... ─▶ sink

An edge from the source says "backward cannot compute this", one to the sink "backward needs it".
The cut edges are the values to keep.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import networkx as nx

from shoal.errors import InvariantError

SOURCE = ("source", -1)
SINK = ("sink", -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CutNode:
    """One value."""

    name: str
    cost: int | None
    """To keep it; None where it cannot be kept."""
    reads: tuple[int, ...] = ()
    """The nodes it is made of: they stand further left."""
    only_forward: bool = False
    """Whether backward cannot compute it."""
    only_backward: bool = False
    """Whether backward computes it, and not forward."""
    needed: bool = False
    """Whether backward gives it out as it is."""

    def __post_init__(self) -> None:
        if self.cost is not None and self.cost < 0:
            raise ValueError(f"expected a cost of at least 0 for {self.name}, got {self.cost}")
        if self.only_forward and self.only_backward:
            raise ValueError(f"{self.name} cannot run in forward alone and in backward alone")


def cheapest_kept(nodes: Iterable[CutNode]) -> list[int]:
    """The places of the values to keep, in order; of equally cheap sets the nearest to backward."""
    nodes = list(nodes)
    relevant = _reaching_backward(nodes)
    if not relevant:
        return []
    network = _network(nodes, relevant)
    try:
        _, (_, behind) = nx.minimum_cut(network, SOURCE, SINK)
    except nx.NetworkXUnbounded:
        raise InvariantError(_conflict(nodes, network)) from None
    return [i for i in sorted(relevant) if ("out", i) in behind and ("in", i) not in behind]


def _reaching_backward(nodes: list[CutNode]) -> set[int]:
    found: set[int] = set()
    for place in reversed(range(len(nodes))):
        node = nodes[place]
        if node.only_backward or node.needed or place in found:
            found.add(place)
            found.update(node.reads)
    return found


def _network(nodes: list[CutNode], relevant: set[int]) -> nx.DiGraph:
    network = nx.DiGraph()  # an edge without a capacity is as wide as can be
    network.add_nodes_from((SOURCE, SINK))
    for place in sorted(relevant):
        node = nodes[place]
        reader = SINK if node.only_backward else ("in", place)
        for read in node.reads:
            if not nodes[read].only_backward:
                network.add_edge(("out", read), reader)
        if node.only_backward:
            continue
        width = {} if node.cost is None else {"capacity": node.cost}
        network.add_edge(("in", place), ("out", place), **width)
        if node.only_forward:
            network.add_edge(SOURCE, ("in", place))
        if node.needed:
            network.add_edge(("out", place), SINK)
    return network


def _conflict(nodes: list[CutNode], network: nx.DiGraph) -> str:
    """Say which value backward needs, cannot be given, and cannot compute."""
    endless = nx.DiGraph(
        (one, other) for one, other, width in network.edges(data="capacity") if width is None
    )
    path = nx.shortest_path(endless, SOURCE, SINK)
    names = list(dict.fromkeys(nodes[place].name for _, place in path[1:-1]))
    return (
        f"backward needs {names[-1]}, but nothing on the way from {names[0]}, which only forward "
        f"can compute, can be kept: {' -> '.join(names)}. Let one of them be kept (drop its "
        "recompute tag, or return a tensor instead of a tuple)"
    )
