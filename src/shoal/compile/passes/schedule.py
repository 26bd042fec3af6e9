"""When collectives start, and when they are waited for.

One walk over a graph in its order. What computes keeps its order; around it

- a collective starts as soon as what it sends is there, and there is room for it within the
  bounds: those whose results are needed first go first;
- at its own place a reduction starts in any case. If there is no room by then, the oldest ones in
  flight are waited for, before its gradients are laid in a row, so that the memory of the last row
  is there for the next. A gather is held back until there is room, or somebody needs it;
- a wait, with views of its result and cheap work on it alone, stands right before the first node
  that needs it.

So early is a choice, and on time is not: the bound holds, and nothing waits for room for ever.
What a collective alone reads, and is cheap, moves with it.
"""

from __future__ import annotations

import bisect
import heapq
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

from torch import fx

from shoal.comm.collectives import Kind as CommKind
from shoal.compile.node_kinds import NodeKind, closure, is_wait, kind, op_name
from shoal.compile.passes.collectives import collective
from shoal.compile.passes.comm_block import CommBlock, get_all_comm_blocks
from shoal.compile.passes.cost import Costs
from shoal.compile.passes.dependencies import Dependencies, put_in_order
from shoal.compile.passes.memory import fused_nodes, places_of_work
from shoal.errors import UsageError

CHEAP = (NodeKind.VIEW, NodeKind.ITEM, NodeKind.CHEAP, NodeKind.SIZE)
"""The kinds of nodes that may move with a collective: cheap to do early, or to put off."""


LAY_IN_ROW = "shoal::lay_in_row"
"""Puts gradients in a row to be reduced: an operator of its own, but nothing computes in it."""


def delay_waits(graph: fx.Graph, kinds: Collection[CommKind] = tuple(CommKind)) -> None:
    """Move the waits of collectives of some kinds to where their results are first needed."""
    blocks = [block for block in get_all_comm_blocks(graph) if block.key.kind in kinds]
    _schedule(graph, blocks, early=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much memory collectives may have at a time; None: as much as they ask for."""

    in_flight: int | None = None
    """Bytes of all collectives on their way."""
    gathered: int | None = None
    """Bytes of gathers, from the start until the result is read for the last time.

    What is read by those that run while many others come and go, as the root's, does not count.
    """
    reduced: int | None = None
    """Bytes of reductions on their way, until the last of all collectives starts."""

    def __post_init__(self) -> None:
        for field in fields(self):
            bound = getattr(self, field.name)
            if bound is not None and bound <= 0:
                raise UsageError(f"expected a bound above 0 bytes, got {bound}: {field.name}")


def overlap(
    graph: fx.Graph,
    max_in_flight_bytes: int | None = None,
    costs: Costs | None = None,
    *,
    max_gathered_bytes: int | None = None,
    max_reduced_bytes: int | None = None,
) -> None:
    """Start collectives early and wait late, with bounds on what they hold at a time (`Bounds`).

    With costs, gathers start no earlier than they have to, so that less memory is taken.
    """
    bounds = Bounds(
        in_flight=max_in_flight_bytes, gathered=max_gathered_bytes, reduced=max_reduced_bytes
    )
    _schedule(graph, get_all_comm_blocks(graph), early=True, bounds=bounds, costs=costs)


def _schedule(
    graph: fx.Graph,
    blocks: Sequence[CommBlock],
    *,
    early: bool,
    bounds: Bounds | None = None,
    costs: Costs | None = None,
) -> None:
    """Put the nodes of a graph in the order in which they should run."""
    if blocks:
        bounds = bounds or Bounds()
        walk = _ScheduleWalk(Dependencies(graph), blocks, early=early, bounds=bounds)
        if costs is not None:
            needs = {one.block.comm_node: one.need for one in walk.launches}
            walk.not_before = start_places(walk.nodes, blocks, needs, costs)
        put_in_order(graph, walk.run())
    graph.lint()


@dataclass(slots=True, kw_only=True, eq=False)
class _PendingCollective:
    """A collective on its way from 'not ready' to 'waited for'."""

    block: CommBlock
    nodes: list[fx.Node]
    """The nodes that prepare the collective and serve nothing else, then the collective."""
    need: int
    """The place of the first node that needs a result."""
    missing: int = 0
    """How many nodes from elsewhere must still run."""
    unfinished: set[fx.Node]
    """The waits that have not run."""
    counts: bool = False
    """Whether its result counts as gathered until it is read for the last time."""

    @property
    def gathers(self) -> bool:
        """Whether it is a gather."""
        return self.block.key.kind is CommKind.ALL_GATHER


class _ScheduleWalk:
    """The state of one walk over a graph."""

    def __init__(
        self,
        dependencies: Dependencies,
        blocks: Sequence[CommBlock],
        *,
        early: bool,
        bounds: Bounds,
    ) -> None:
        self.before, self.index = dependencies.before, dependencies.index
        self.nodes = dependencies.nodes
        self.early, self.bounds = early, bounds
        self.order: list[fx.Node] = []
        self.done: set[fx.Node] = set()
        self.lazy = self._lazy(blocks)
        self.need = self._needs()
        self.launches = [self._launch(block) for block in blocks]
        self.start_of = {one.block.comm_node: one for one in self.launches}
        self.prepared = {node for one in self.launches for node in one.nodes}
        self.wait_of = {wait: one for one in self.launches for wait in one.block.wait_nodes}
        self.in_flight: deque[_PendingCollective] = deque()
        self.gathered: set[_PendingCollective] = set()
        """Gathers that have ended and whose results are still read."""
        self.freed_by: defaultdict[fx.Node, list[_PendingCollective]] = defaultdict(list)
        """By the node that reads the result of a gather for the last time."""
        self.pressing: set[_PendingCollective] = set()
        self.ready: list[tuple[int, int, _PendingCollective]] = []
        self.waiting: dict[fx.Node, list[_PendingCollective]] = {}
        self.not_before: dict[fx.Node, int] = {}
        """The places before which collectives should not start."""
        self.place = 0
        if early:
            self._watch()
            self._find_last_readers()

    def run(self) -> list[fx.Node]:
        """Walk once over the graph."""
        self._finish(node for node in self.nodes if node.op == "placeholder")  # stay in front
        for node in self.nodes:
            if node in self.done or node.op == "output":
                continue
            self.place = self.index[node]
            self._start_early()
            launch = self.start_of.get(node)
            if launch is not None and self._is_due(launch):
                self._start(launch)
            elif node not in self.lazy and node not in self.prepared:
                # After the waits that it needs, and after what their end makes room for.
                self._finish(self.before[node])
                self._start_early()
                self._append(node)
        self._finish(self.nodes[:-1])
        self._finish(self.nodes)
        return self.order

    def _lazy(self, blocks: Sequence[CommBlock]) -> set[fx.Node]:
        """The nodes to put off: items, waits, and cheap work on nothing but results."""
        lazy = {node for block in blocks for node in block.node_list[1:]}
        for node in self.nodes:
            alone = bool(node.all_input_nodes) and lazy.issuperset(node.all_input_nodes)
            if alone and node.op == "call_function" and kind(node) in CHEAP:
                lazy.add(node)
        return lazy

    def _needs(self) -> dict[fx.Node, int]:
        """For each node that is put off, the place of the first node that needs it."""
        needs: dict[fx.Node, int] = {}
        for node in reversed(self.nodes):
            if node in self.lazy:
                places = (needs.get(user, self.index[user]) for user in node.users)
                needs[node] = min(places, default=len(self.nodes))
        return needs

    def _launch(self, block: CommBlock) -> _PendingCollective:
        nodes = self._preparation(block.comm_node) if self.early else []
        return _PendingCollective(
            block=block,
            nodes=[*nodes, block.comm_node],
            need=min(self.need[wait] for wait in block.wait_nodes),
            unfinished=set(block.wait_nodes),
        )

    def _find_last_readers(self) -> None:
        """Note who reads the result of each gather for the last time, where that frees memory.

        Kernels may be fused: then cheap nodes read when the kernel runs that they end up in.
        """
        last = places_of_work(self.index, fused_nodes(self.nodes[0].graph) | self.lazy)
        gathers = [one for one in self.launches if one.gathers]
        ends = {one: max(last[wait] for wait in one.block.wait_nodes) for one in gathers}
        for one, end in ends.items():
            if end >= len(self.nodes) - 1:
                continue  # it leaves the graph
            meanwhile = sum(one.need < other.need < end for other in gathers)
            one.counts = meanwhile <= 1  # the next one may be needed before this one is done with
            self.freed_by[self.nodes[end]].append(one)

    def _preparation(self, comm_node: fx.Node) -> list[fx.Node]:
        """The cheap nodes before a collective that serve nothing else, in order.

        And the one that lays gradients in a row: before it has run there is no row.
        """
        found = {comm_node}
        pending = [comm_node]
        while pending:
            for node in self.before[pending.pop()] - found - self.lazy:
                own = node.op == "call_function" and all(user in found for user in node.users)
                if own and op_name(node) == LAY_IN_ROW:
                    found.add(node)
                elif own and kind(node) in CHEAP:
                    found.add(node)
                    pending.append(node)
        return sorted(found - {comm_node}, key=self.index.__getitem__)

    def _watch(self) -> None:
        """Note the nodes that each collective still needs."""
        for launch in self.launches:
            needed = {one for node in launch.nodes for one in self.before[node]}
            needed -= set(launch.nodes)
            launch.missing = len(needed)
            for one in needed:
                self.waiting.setdefault(one, []).append(launch)
            if not needed:
                self._is_ready(launch)

    def _start(self, launch: _PendingCollective) -> None:
        """Start a collective whose place has come."""
        if not launch.missing:
            self._make_room(launch)
        self._finish(launch.nodes)

    def _finish(self, nodes: Iterable[fx.Node]) -> None:
        """Run those of some nodes that were put off, and what they need, in their order."""
        missing = closure(set(nodes) - self.done, lambda node: self.before[node] - self.done)
        for node in sorted(missing, key=self.index.__getitem__):
            self._append(node)

    def _append(self, node: fx.Node) -> None:
        started, waited = self.start_of.get(node), self.wait_of.get(node)
        if started is not None:
            self._make_room(started)
        if node in self.done:  # by now: it was needed to make room
            return
        self.order.append(node)
        self.done.add(node)
        if started is not None:
            self.in_flight.append(started)
        if waited is not None:
            waited.unfinished.discard(node)
            if not waited.unfinished:
                self.in_flight.remove(waited)
                if waited.counts:
                    self.gathered.add(waited)
        self.gathered.difference_update(self.freed_by.get(node, ()))
        for one in self.waiting.pop(node, ()):
            one.missing -= 1
            if not one.missing:
                self._is_ready(one)

    def _make_room(self, launch: _PendingCollective) -> None:
        """Wait for the oldest collectives in flight until another one fits."""
        if launch in self.pressing:
            return  # one in flight needs it to end: this is on the way to room already
        self.pressing.add(launch)
        while (others := self._in_the_way(launch)) is not None:
            self._finish(others.block.wait_nodes)

    def _is_ready(self, launch: _PendingCollective) -> None:
        heapq.heappush(self.ready, (launch.need, self.index[launch.block.comm_node], launch))

    def _is_due(self, launch: _PendingCollective) -> bool:
        """Whether a collective whose place has come must start, with or without room.

        Held back, a gather costs nothing: its result is larger than what it reads. A reduction
        would keep the larger side alive. Without a bound all that is ready has started.
        """
        return launch.missing > 0 or not self.early or not launch.gathers

    def _start_early(self) -> None:
        """Start collectives that are ready, as long as there is room."""
        while self.ready:
            launch = self.ready[0][2]
            comm_node = launch.block.comm_node
            is_time = self.not_before.get(comm_node, 0) <= self.place
            if comm_node not in self.done and not (is_time and self._fits(launch)):
                return
            heapq.heappop(self.ready)
            self._finish(launch.nodes)

    def _is_last(self, launch: _PendingCollective) -> bool:
        """Whether all others have started."""
        return all(one is launch or one.block.comm_node in self.done for one in self.launches)

    def _fits(self, launch: _PendingCollective) -> bool:
        if launch.counts:
            held = [*self.gathered, *(one for one in self.in_flight if one.counts)]
            if _is_too_much(held, launch, self.bounds.gathered):
                return False
        return self._in_the_way(launch) is None

    def _in_the_way(self, launch: _PendingCollective) -> _PendingCollective | None:
        """The collective to wait for first, so that there is room for another one."""
        if _is_too_much(self.in_flight, launch, self.bounds.in_flight):
            return self.in_flight[0]
        reductions = [one for one in self.in_flight if not one.gathers]
        # By the last one all else is freed, and the link would stand still.
        if launch.gathers or self._is_last(launch):
            return None
        return reductions[0] if _is_too_much(reductions, launch, self.bounds.reduced) else None


def _is_too_much(
    others: Collection[_PendingCollective], launch: _PendingCollective, bound: int | None
) -> bool:
    """Whether a collective and others are more than a bound; never if there are no others."""
    if bound is None or not others:
        return False
    return sum(one.block.num_bytes for one in (*others, launch)) > bound


MARGIN = 2.0
"""A factor on the estimated time of a gather: too late costs more than too early."""


def start_places(
    nodes: Sequence[fx.Node],
    blocks: Sequence[CommBlock],
    needs: Mapping[fx.Node, int],
    costs: Costs,
) -> dict[fx.Node, int]:
    """For each all-gather's node the place in a graph before which it should not start.

    need        ─────────── A ──── B ─────────────   places of the first nodes that need a result
    link           [ a  ][ b ]                       one after another, each done when it is needed
    start       ───▲─────▲────────────────────────   no earlier: what is gathered takes memory

    Computed from the back: a gather ends before it is needed, and before the next one must start.
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
