"""The memory of a graph: what is alive at each node, and of which kind.

    node     gather   mm   mm   lay_in_row   reduce-scatter   wait
    gathered [=============]
    sent                        [============================]
    reduced                                  [===================

A piece of memory lives from the node that makes it to the last one that reads it, under whatever
name. What a collective sends lives until its wait. Where kernels are fused, what only goes from
one cheap node to others takes no memory, and what it is made of is read when these run.

An estimate to compare orders of one graph with, before anything has run: an allocator rounds sizes
up, and keeps more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate

from torch import fx

from shoal.comm.collectives import Kind as CommKind
from shoal.compile.node_kinds import NodeKind, kind, value
from shoal.compile.partition.cost import held_bytes
from shoal.compile.passes.collectives import collective, sent_nodes
from shoal.compile.passes.dependencies import Dependencies

MIB = 1 << 20


class Use(StrEnum):
    """What memory is for."""

    GIVEN = "given"
    """Inputs that nobody reads afterwards: what forward has saved, in backward."""
    GATHERED = "gathered"
    SENT = "sent"
    """Made to be sent and for nothing else: shards in another dtype, gradients laid in a row."""
    REDUCED = "reduced"
    RETURNED = "returned"
    """Outputs of the graph that no collective brought: what is saved, in forward."""
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphMemory:
    """The bytes that a graph takes while each node runs, beside the inputs that stay."""

    nodes: tuple[str, ...]
    """Names, in the order of the graph."""
    by_use: Mapping[Use, tuple[int, ...]]
    """For each node; uses that do not occur are absent."""

    @property
    def total(self) -> dict[str, int]:
        """What is alive while each node runs, by its name."""
        sums = map(sum, zip(*self.by_use.values(), strict=True))
        return dict(zip(self.nodes, sums, strict=True)) if self.by_use else {}

    @property
    def at(self) -> str:
        """The node that runs when most is alive; empty if nothing ever is."""
        total = self.total
        return max(total, key=total.__getitem__, default="")

    @property
    def peak_bytes(self) -> int:
        """The most that is alive at a time."""
        return self.total.get(self.at, 0)

    @property
    def peak(self) -> dict[Use, int]:
        """What is alive then, by use."""
        if not self.by_use:
            return {}
        place = self.nodes.index(self.at)
        return {use: sizes[place] for use, sizes in self.by_use.items() if sizes[place]}

    def most(self, use: Use) -> int:
        """The most that is alive for a use, whenever that is."""
        return max(self.by_use.get(use, ()), default=0)

    def __str__(self) -> str:
        """One line."""
        largest_first = sorted(self.peak.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{size / MIB:.1f} {use}" for use, size in largest_first)
        return f"estimated: at most {self.peak_bytes / MIB:.1f} MiB, at {self.at}: {parts}"


def memory_of(graph: fx.Graph, given: Collection[str] = (), *, fuses: bool = False) -> GraphMemory:
    """Walk over a graph and count what is alive.

    `given` are names of inputs that are freed after their last reader; the others stay, and do not
    count. `fuses` is for compilers that fuse cheap nodes.
    """
    dependencies = Dependencies(graph)
    index = dependencies.index
    fused = fused_nodes(graph) if fuses else set()
    pieces = _pieces(dependencies, fused, given)
    runs_at = places_of_work(index, fused)
    for node in dependencies.nodes:
        for name in dependencies.memory(node):
            if name in pieces:
                pieces[name].holders.append(node)
        for name in dependencies.reads(node):
            if name in pieces:
                pieces[name].last = max(pieces[name].last, runs_at[node])
    changes: dict[Use, Counter[int]] = defaultdict(Counter)
    for piece in pieces.values():
        change = changes[piece.use]
        change[0 if piece.node.op == "placeholder" else index[piece.node]] += piece.num_bytes
        change[piece.last + 1] -= piece.num_bytes
    places = range(len(index))
    return GraphMemory(
        nodes=tuple(node.name for node in index),
        by_use={
            use: tuple(accumulate(change[place] for place in places))
            for use, change in changes.items()
        },
    )


@dataclass(slots=True, kw_only=True)
class _Piece:
    """A piece of memory, and who has to do with it."""

    node: fx.Node
    """The node that makes it."""
    num_bytes: int
    last: int
    """The place of the last node that reads it."""
    holders: list[fx.Node] = field(default_factory=list)
    """The nodes whose values lie in it."""

    @property
    def use(self) -> Use:
        if self.node.op == "placeholder":
            return Use.GIVEN
        op = collective(self.node)
        if op is not None:
            return Use.GATHERED if op.kind is CommKind.ALL_GATHER else Use.REDUCED
        holders = set(self.holders)
        readers = {user for node in holders for user in node.users} - holders
        if any(reader.op == "output" for reader in readers):
            return Use.RETURNED
        sent = all(not holders.isdisjoint(sent_nodes(reader)) for reader in readers)
        return Use.SENT if readers and sent else Use.OTHER


def _pieces(
    dependencies: Dependencies, fused: Collection[fx.Node], given: Collection[str]
) -> dict[Hashable, _Piece]:
    """The memory that a graph takes, by the names that its dependencies have for it."""
    pieces: dict[Hashable, _Piece] = {}
    for node, place in dependencies.index.items():
        counts = node.name in given if node.op == "placeholder" else node.op == "call_function"
        if not counts or node in fused:
            continue
        held = value(node)
        for name in dependencies.memory(node) - dependencies.memory(*node.all_input_nodes):
            one = held
            if isinstance(name, tuple) and name[0] is node and isinstance(held, list | tuple):
                one = held[name[1]]
            pieces.setdefault(name, _Piece(node=node, num_bytes=held_bytes(one), last=place))
    return pieces


def places_of_work(index: Mapping[fx.Node, int], fused: Collection[fx.Node]) -> dict[fx.Node, int]:
    """The place at which each node runs at last: fused ones where those run that read them."""
    places: dict[fx.Node, int] = {}
    for node in reversed(list(index)):
        readers = (places[user] for user in node.users) if node in fused else (index[node],)
        places[node] = max(readers, default=index[node])
    return places


def fused_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The cheap nodes, and views, whose values only go into other cheap nodes and reductions."""
    fused: set[fx.Node] = set()
    taken: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        found = kind(node)
        own = bool(node.users) and taken.issuperset(node.users)
        if own and found in (NodeKind.CHEAP, NodeKind.VIEW):
            fused.add(node)
        if node in fused or found in (NodeKind.CHEAP, NodeKind.REDUCTION):
            taken.add(node)
    return fused
