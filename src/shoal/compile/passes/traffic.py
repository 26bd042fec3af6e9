"""The collectives of a graph: counted, and laid out in time."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from shoal.compile.node_kinds import is_wait
from shoal.compile.passes.collectives import collective
from shoal.compile.passes.comm_block import comm_bytes, get_comm_block
from shoal.compile.passes.cost import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTraffic:
    """How much a graph communicates, and how much of it at a time."""

    num_collectives: int = 0
    num_bytes: int = 0
    num_waits: int = 0
    max_in_flight_bytes: int = 0
    """The most that has started and is not waited for, anywhere in the graph."""


def count_traffic(graph: fx.Graph) -> GraphTraffic:
    """Count the collectives, waits and bytes of a graph, in its order."""
    num_collectives = num_bytes = num_waits = in_flight = most = 0
    landing: dict[fx.Node, tuple[set[fx.Node], int]] = {}
    for node in graph.nodes:
        if collective(node) is not None:
            size = comm_bytes(node)
            num_collectives, num_bytes = num_collectives + 1, num_bytes + size
            block = get_comm_block(node)
            if block is not None:
                in_flight += size
                landing.update(dict.fromkeys(block.wait_nodes, (set(block.wait_nodes), size)))
                most = max(most, in_flight)
        elif is_wait(node):
            num_waits += 1
            left, size = landing.get(node, (set(), 0))
            left.discard(node)
            in_flight -= 0 if left else size
    return GraphTraffic(
        num_collectives=num_collectives,
        num_bytes=num_bytes,
        num_waits=num_waits,
        max_in_flight_bytes=most,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The estimated times of a graph, in its order."""

    total_us: float
    exposed_us: float
    """How long nothing computes because the link is not done."""
    link_us: float
    """How long the link is in use."""

    def __str__(self) -> str:
        """One line."""
        return (
            f"estimated: {self.total_us:.0f} us, of which {self.exposed_us:.0f} wait for the link, "
            f"which is in use for {self.link_us:.0f}"
        )


def timeline(graph: fx.Graph, costs: Costs) -> Timeline:
    """Walk over a graph as a rank would run it: one clock for what computes, one for the link.

    compute  ── mm ── mm ── wait ───── mm ──      busy, then exposed until the link is done
    link        └── gather ─────┘

    Collectives take the link one after another, in the order of their starts.
    """
    clock = free_at = exposed = link = 0.0
    due: dict[fx.Node, float] = {}
    for node in graph.nodes:
        if collective(node) is not None:
            start = max(clock, free_at)
            duration = costs.of_link(node)
            link += duration
            free_at = start + duration
            block = get_comm_block(node)
            if block is None:  # it waits for itself
                exposed += free_at - clock
                clock = free_at
            else:
                due.update(dict.fromkeys(block.wait_nodes, free_at))
        elif is_wait(node):
            late = max(0.0, due.get(node, clock) - clock)
            exposed += late
            clock += late
        else:
            clock += costs.of_compute(node)
    return Timeline(total_us=clock, exposed_us=exposed, link_us=link)
