"""Another order for the nodes of a graph."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence

from torch import fx

from shoal.compile.passes.dependencies import Dependencies
from shoal.errors import InvariantError

Group = tuple[fx.Node, ...]
"""Nodes that stand side by side."""


def put_in_order(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    """Give the nodes of a graph an order."""
    if set(order) != set(graph.nodes) or len(order) != len(graph.nodes):
        raise InvariantError(
            f"expected each of the graph's {len(graph.nodes)} nodes once, got {len(order)}"
        )
    for earlier, later in itertools.pairwise(order):
        earlier.append(later)


def bring_together(dependencies: Dependencies, groups: Iterable[Group]) -> list[fx.Node]:
    """An order in which each group stands in one piece, and all else near its place.

    A group stands where its last node stood, or later if what it needs comes later.
    """
    index, nodes = dependencies.index, dependencies.nodes
    group_of: dict[fx.Node, Group] = {node: (node,) for node in nodes}
    for group in groups:
        ordered = tuple(sorted(group, key=index.__getitem__))
        group_of.update(dict.fromkeys(ordered, ordered))
    all_groups = list(dict.fromkeys(group_of.values()))
    after: dict[Group, set[Group]] = {one: set() for one in all_groups}
    missing = dict.fromkeys(all_groups, 0)
    for group in all_groups:
        needed = {group_of[one] for node in group for one in dependencies.before[node]} - {group}
        missing[group] = len(needed)
        for one in needed:
            after[one].add(group)
    ready = [(index[group[-1]], group) for group in all_groups if not missing[group]]
    heapq.heapify(ready)
    order: list[fx.Node] = []
    while ready:
        _, group = heapq.heappop(ready)
        order += group
        for one in after[group]:
            missing[one] -= 1
            if not missing[one]:
                heapq.heappush(ready, (index[one[-1]], one))
    if len(order) != len(nodes):
        stuck = [group for group in all_groups if missing[group] and len(group) > 1]
        raise InvariantError(
            f"these nodes cannot stand together, since one needs another: {stuck[:1]}"
        )
    return order
