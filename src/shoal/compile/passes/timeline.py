"""When a graph's nodes would run: one clock for what computes, one for the link.

    compute  ── mm ── mm ── wait ───── mm ──      busy, then exposed until the link is done
    link        └── gather ─────┘

Collectives take the link one after another, in the order of their starts.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from shoal.compile.passes.collectives import collective, is_wait
from shoal.compile.passes.comm_block import get_comm_block
from shoal.compile.passes.cost import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What a graph takes, in its order."""

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
    """Walk over a graph as a rank would run it."""
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
