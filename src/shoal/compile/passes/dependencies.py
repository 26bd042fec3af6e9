"""The nodes that must run before each node of a graph.

Values are not all: a node that writes into memory comes after those that read the old bytes and
before those that read the new ones, even where no value goes from one to the other. A
collective uses what it was given until its wait, so the wait counts as a reader of the inputs and
as the writer of the results. Random numbers and effects stay in their order.
"""

from __future__ import annotations

import heapq
import operator
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from shoal._torch import operators
from shoal._torch import storage as torch_storage
from shoal.compile.node_kinds import (
    VIEWS,
    aliased_arguments,
    is_wait,
    mutated_inputs,
    nodes_in,
    op_name,
    tensors_of,
    value,
)
from shoal.compile.passes.collectives import sent_nodes
from shoal.errors import InvariantError

Memory = frozenset[Hashable]
"""The pieces of memory that a value may lie in."""
NOWHERE: Memory = frozenset()


class Dependencies:
    """For each node the ones that must run before it, by value, memory and effect."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes: list[fx.Node] = list(graph.nodes)
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self._memory: dict[fx.Node, list[Memory]] = {}
        for node in self.nodes:
            self._memory[node] = self._results(node)
        self.before: dict[fx.Node, set[fx.Node]] = {}
        self._connect()

    def memory(self, *nodes: fx.Node) -> Memory:
        """Where the values of some nodes may lie."""
        return NOWHERE.union(*(one for node in nodes for one in self._memory[node]))

    def reads(self, node: fx.Node) -> Memory:
        """The memory whose elements a node uses."""
        if is_wait(node):
            return self.memory(*node.all_input_nodes, *_sent_before(node))
        return self.memory(*node.all_input_nodes)

    def writes(self, node: fx.Node) -> Memory:
        """The memory whose elements a node changes."""
        if node.op != "call_function":
            return NOWHERE
        if is_wait(node) or _is_opaque(node) or op_name(node).startswith("c10d::"):
            return self.memory(*node.all_input_nodes)
        return self.memory(*mutated_inputs(node))

    def _connect(self) -> None:
        writes = {node: self.writes(node) for node in self.nodes}
        written = NOWHERE.union(*writes.values())
        writer: dict[Hashable, fx.Node] = {}
        readers: dict[Hashable, list[fx.Node]] = defaultdict(list)
        effect: fx.Node | None = None
        for node in self.nodes:
            before = set(node.all_input_nodes)
            for piece in self.reads(node) & written:
                before.add(writer.get(piece, node))
                readers[piece].append(node)
            for piece in writes[node]:
                before.update((writer.get(piece, node), *readers.pop(piece, ())))
                writer[piece] = node
            if has_effect(node):
                before.add(node if effect is None else effect)
                effect = node
            self.before[node] = before - {node}

    def _results(self, node: fx.Node) -> list[Memory]:
        """Where each of a node's results may lie."""
        if node.op in ("placeholder", "get_attr"):
            return [frozenset({_outside(node)})]
        if node.op == "output":
            return []
        if "val" in node.meta and not tensors_of([node]):
            return []  # numbers, or nothing
        if node.target is operator.getitem:
            return [self._item(node)]
        held = value(node)
        # By position, as they are taken out: between tensors there may be numbers, or nothing.
        num_results = len(held) if isinstance(held, list | tuple) else 1
        fresh: list[Memory] = [frozenset({(node, i)}) for i in range(num_results)]
        shared = self.memory(*_shared_inputs(node))
        if _is_opaque(node):
            return [one | shared for one in fresh]
        return [shared] * len(fresh) if shared else fresh

    def _item(self, node: fx.Node) -> Memory:
        source: Any
        source, place = node.args
        known, held = self._memory[source], value(source)
        if isinstance(place, int) and isinstance(held, list | tuple) and len(known) == len(held):
            return known[place]
        return self.memory(source)  # an item of an item


def has_effect(node: fx.Node) -> bool:
    """Whether a node must keep its place among nodes that do more than compute a result."""
    if node.op in ("call_module", "call_method"):
        return True
    if node.op != "call_function" or node.target is operator.getitem or is_wait(node):
        return False
    op = node.target
    if not isinstance(op, operators.OpOverload):
        return _is_opaque(node)
    return (
        torch.Tag.nondeterministic_seeded in op.tags
        or operators.has_effects(op)
        or op.namespace == "c10d"
        or not operators.schema_of(op).returns
    )


def _is_opaque(node: fx.Node) -> bool:
    """Whether a node calls what has no schema: it may do anything to its tensors."""
    if node.op != "call_function" or node.target is operator.getitem:
        return node.op in ("call_module", "call_method")
    if isinstance(node.target, operators.OpOverload):
        return False
    return bool(tensors_of(node.all_input_nodes))


def _outside(node: fx.Node) -> Hashable:
    """The memory of an input: two inputs may be views of the same."""
    if node.op == "get_attr":
        return "attribute", node.target
    held = value(node)
    storage = torch_storage.storage_key(held) if isinstance(held, Tensor) else None
    return node if storage is None else ("storage", storage)


def _shared_inputs(node: fx.Node) -> Iterable[fx.Node]:
    """The nodes in whose memory the results of another may lie."""
    if _is_opaque(node):
        return node.all_input_nodes
    op = node.target
    if not isinstance(op, operators.OpOverload):
        return ()
    if is_wait(node) or op_name(node) in VIEWS:
        return node.all_input_nodes[:1]
    if all(one.alias_info is None for one in operators.schema_of(op).returns):
        return ()
    return nodes_in(aliased_arguments(node, written=False))


def _sent_before(wait: fx.Node) -> tuple[fx.Node, ...]:
    """The tensors that the collective of a wait sends."""
    source = wait.args[0]
    if isinstance(source, fx.Node) and source.target is operator.getitem:
        source = source.args[0]
    return sent_nodes(source) if isinstance(source, fx.Node) else ()


Group = tuple[fx.Node, ...]
"""Nodes that stand side by side."""


def put_in_order(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    """Give the nodes of a graph an order."""
    if set(order) != set(graph.nodes) or len(order) != len(graph.nodes):
        raise InvariantError(
            f"expected each of the graph's {len(graph.nodes)} nodes once, got {len(order)}"
        )
    for earlier, later in pairwise(order):
        earlier.append(later)


def bring_together(
    dependencies: Dependencies, groups: Iterable[Iterable[fx.Node]]
) -> list[fx.Node]:
    """An order in which each group stands in one piece, and all else near its place.

    A group stands where its last node stood, or later if what it needs comes later.
    """
    index = dependencies.index
    group_of: dict[fx.Node, Group] = {node: (node,) for node in dependencies.nodes}
    for together in groups:
        ordered = tuple(sorted(together, key=index.__getitem__))
        group_of.update(dict.fromkeys(ordered, ordered))
    sorter: TopologicalSorter[Group] = TopologicalSorter()
    for group in dict.fromkeys(group_of.values()):
        needed = {group_of[one] for node in group for one in dependencies.before[node]}
        sorter.add(group, *(needed - {group}))
    try:
        sorter.prepare()
    except CycleError as error:
        stuck = [group for group in error.args[1] if len(group) > 1]
        raise InvariantError(
            f"these nodes cannot stand together, since one needs another: {stuck[:1]}"
        ) from None
    ready: list[tuple[int, Group]] = []
    order: list[fx.Node] = []
    while sorter.is_active():
        for group in sorter.get_ready():
            heapq.heappush(ready, (index[group[-1]], group))
        _, group = heapq.heappop(ready)
        order += group
        sorter.done(group)
    return order
