"""From where on a gather should be on its way, so that nobody waits for it.

    need        ─────────── A ──── B ─────────────   places of the first nodes that need a result
    link           [ a  ][ b ]                       one after another, each done when it is needed
    start       ───▲─────▲────────────────────────   no earlier: what is gathered takes memory

Computed from the back: a gather ends before it is needed, and before the next one must start.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from itertools import accumulate

from torch import fx

from shoal.compile.passes.collectives import CommKind, collective, is_wait
from shoal.compile.passes.comm_block import CommBlock
from shoal.compile.passes.cost import Costs

MARGIN = 2.0
"""By how much longer than estimated a gather is taken to be: too late costs more than too early."""


def start_places(
    nodes: Sequence[fx.Node],
    blocks: Sequence[CommBlock],
    needs: Mapping[fx.Node, int],
    costs: Costs,
) -> dict[fx.Node, int]:
    """For each all-gather's node the place in a graph before which it should not start.

    `needs` has the place where the first result of a collective's node is needed.
    """
    clock = [
        0.0,
        *accumulate(
            0.0 if collective(node) is not None or is_wait(node) else costs.of_compute(node)
            for node in nodes
        ),
    ]
    gathers = [block.comm_node for block in blocks if block.key.kind is CommKind.ALL_GATHER]
    places: dict[fx.Node, int] = {}
    next_start = clock[-1]
    for node in sorted(gathers, key=needs.__getitem__, reverse=True):
        end = min(clock[min(needs[node], len(nodes))], next_start)
        next_start = end - MARGIN * costs.of_link(node)
        places[node] = max(0, bisect.bisect_right(clock, next_start) - 1)
    return places
