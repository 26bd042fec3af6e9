"""Write results over memory that is there, in graphs whose operators are called one by one.

    add(x, 1) ─► copy_(x, ·)      ──►      add_(x, 1)                 `update_in_place`
    cat ─► div ─► all_reduce      ──►      cat ─► div_ ─► all_reduce_     `average_in_place`

Compilers that plan memory do it by themselves.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shoal._torch import operators
from shoal.compile.node_kinds import is_tensor, op_name, value
from shoal.compile.passes.bucket_all_reduce import FOREACH, scaling
from shoal.compile.passes.collectives import variant
from shoal.compile.passes.comm_block import get_all_comm_blocks
from shoal.compile.passes.dependencies import Dependencies
from shoal.compile.passes.metadata import compute_metadata

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Twin:
    """The operator that writes over arguments what another one returns."""

    op: operators.OpOverload
    written: Mapping[int | None, int]
    """For results, by number, the places of the arguments; None is the number of an only one."""


TWINS: dict[Any, Twin] = {
    aten._native_batch_norm_legit_functional.default: Twin(
        aten._native_batch_norm_legit.default, {3: 3, 4: 4}
    ),
}
"""The twins that are not found by their names."""


@dataclass(frozen=True, slots=True)
class Update:
    """A new value that is copied to an input."""

    copy: fx.Node
    written: fx.Node
    new: fx.Node
    source: fx.Node
    """The node that computes the new value."""
    number: int | None
    """The place of the value among several results."""


def _updates(graph: fx.Graph) -> Iterator[Update]:
    """The copies to inputs whose results nobody reads."""
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        written, new = copy.args[:2]
        if not isinstance(written, fx.Node) or not isinstance(new, fx.Node) or copy.users:
            continue
        if written.op == "placeholder":
            source, number = new.args if new.target is operator.getitem else (new, None)
            yield Update(copy, written, new, source, number)  # type: ignore[arg-type]


def update_in_place(graph: fx.Graph) -> int:
    """Write new values of inputs at once instead of copying them later; say how many."""
    by_source: dict[fx.Node, list[Update]] = defaultdict(list)
    for update in _updates(graph):
        by_source[update.source].append(update)
    twins = {source: twin for source in by_source if (twin := _twin_of(source)) is not None}
    if not twins:
        return 0
    readers = _Readers(graph)
    found = [
        source
        for source, twin in twins.items()
        if {one.number for one in by_source[source]} == twin.written.keys()
        and all(
            source.args[twin.written[one.number]] is one.written and readers.allows(one)
            for one in by_source[source]
        )
    ]
    for source in found:
        for update in by_source[source]:
            graph.erase_node(update.copy)
            if update.new is not source:
                update.new.replace_all_uses_with(update.written)
                graph.erase_node(update.new)
        source.target = twins[source].op
        compute_metadata(source)
    return sum(len(by_source[source]) for source in found)


def _twin_of(node: fx.Node) -> Twin | None:
    op = node.target
    if op in TWINS:
        return TWINS[op]
    if not isinstance(op, operators.OpOverload) or torch.Tag.pointwise not in op.tags:
        return None
    found = operators.in_place_of(op)
    return None if found is None else Twin(found, {None: 0})


class _Readers:
    """The nodes that would see an input change early, or a value lie in an input."""

    def __init__(self, graph: fx.Graph) -> None:
        self._dependencies = Dependencies(graph)
        self._readers: dict[Hashable, list[fx.Node]] = defaultdict(list)
        for node in self._dependencies.nodes:
            for piece in self._dependencies.reads(node):
                self._readers[piece].append(node)

    def allows(self, update: Update) -> bool:
        """Whether no reader would, so that the input may be written at once."""
        source, known = update.source, self._dependencies
        memory, output = known.memory(update.written), known.nodes[-1]
        others = known.memory(*(one for one in source.all_input_nodes if one is not update.written))
        readers = {node for piece in memory for node in self._readers[piece]}
        return (
            _are_alike(value(update.written), value(update.new))
            # Elements could change before they are read in another place.
            and not memory & others
            and all(
                known.index[node] < known.index[source]
                for node in readers - {source, update.copy, output}
            )
            and not known.memory(update.new) & known.reads(output)
        )


def _are_alike(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    if not all(isinstance(size, int) for size in (*a.shape, *b.shape)):
        return False
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


ALL_REDUCE = "_c10d_functional::all_reduce"
SCALED_IN_PLACE: dict[Any, Any] = {op: operators.in_place_of(op) for op in FOREACH}
NEW = frozenset({aten.cat.default, aten._to_copy.default, *FOREACH, *SCALED_IN_PLACE.values()})
"""The operators that return new memory, or memory that they alone were given to write to."""


def average_in_place(graph: fx.Graph) -> int:
    """Write results of all-reduces, and of scalings before them, over what they are made of.

    Only where that is new memory that nobody else reads. Says how many were written over.
    """
    count = 0
    for block in get_all_comm_blocks(graph):
        sent = block.inputs[0]
        if op_name(block.comm_node) == ALL_REDUCE and _is_own(sent):
            count += 1 + _scale_in_place(sent)
            block.comm_node.target = variant(block.comm_node, "all_reduce_")
    graph.lint()
    return count


def _scale_in_place(node: fx.Node) -> int:
    """Let a scaling write over what it scales, if that is nobody else's and as wide."""
    found, scaled = scaling(node), node.all_input_nodes[0]
    if found is None or not _is_own(scaled) or found.dtype != value(node).dtype:
        return 0
    node.target = SCALED_IN_PLACE[node.target]
    return 1


def _is_own(node: fx.Node) -> bool:
    """Whether a node gives a tensor, without gaps, in memory that only one node reads."""
    is_new = is_tensor(node) and node.target in NEW and len(node.users) == 1
    return is_new and value(node).is_contiguous()
