"""What a graph communicates, counted."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from shoal.compile.passes.collectives import collective, is_wait
from shoal.compile.passes.comm_block import comm_bytes, get_comm_block


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """How much a graph communicates, and how much of it at a time."""

    num_collectives: int = 0
    num_bytes: int = 0
    num_waits: int = 0
    max_in_flight_bytes: int = 0
    """The most that has started and is not waited for, anywhere in the graph."""


def count_traffic(graph: fx.Graph) -> Traffic:
    """Count what a graph communicates, in its order."""
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
    return Traffic(
        num_collectives=num_collectives,
        num_bytes=num_bytes,
        num_waits=num_waits,
        max_in_flight_bytes=most,
    )
