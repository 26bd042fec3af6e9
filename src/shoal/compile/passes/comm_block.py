"""A collective with all that belongs to it: `CommBlock`.

input ─► comm_node ─► (getitem ─►) wait ─► views of the result ─► who uses it
         └─────────────── node_list ──────────────────┘
                                             └ outputs: the last of it that others read
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shoal._torch import operators, symbols
from shoal.comm.collectives import Kind as CommKind
from shoal.compile.node_kinds import NodeKind, is_wait, kind, tensors_of
from shoal.compile.passes.collectives import collective, sent_nodes
from shoal.errors import UsageError

REDUCE_OP = ("reduce_op", "reduceOp")
GROUP = ("group_name", "process_group", "tag", "ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommKey:
    """The properties that two collectives must share to become one."""

    kind: CommKind
    group: tuple[Any, ...]
    reduce_op: str | None
    dtype: torch.dtype | None
    """None where the tensors of one coalesced collective differ."""
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommBlock:
    """A collective, its waits, and the views of its results."""

    comm_node: fx.Node
    inputs: tuple[fx.Node, ...]
    wait_nodes: tuple[fx.Node, ...]
    """One for each result that is used, in the order of the results."""
    node_list: tuple[fx.Node, ...]
    """Collective, items, waits, views: each after what it reads."""
    outputs: tuple[fx.Node, ...]
    shape: torch.Size | list[torch.Size]
    """Of the tensor that is sent; a list of shapes where the collective takes a list."""
    key: CommKey
    num_bytes: int
    """The memory of one rank while it runs: the larger of its input and its result."""

    def __post_init__(self) -> None:
        if not self.wait_nodes or not all(map(is_wait, self.wait_nodes)):
            raise UsageError(
                f"expected the waits of {self.comm_node.name}, got {self.wait_nodes}: a block is "
                "a collective whose results are all waited for"
            )


def get_comm_block(comm_node: fx.Node) -> CommBlock | None:
    """The block around a collective's node; None if its results are not waited for one by one."""
    op = collective(comm_node)
    if op is None or not op.awaited:
        return None
    arrival = _arrival(comm_node, coalesced=op.coalesced)
    inputs = sent_nodes(comm_node)
    if arrival is None or not inputs:
        return None
    items, waits = arrival
    views, outputs = _views(waits)
    tensors = tensors_of(inputs)
    if not tensors:
        raise UsageError(
            f"expected what {inputs[0].name} gives in its metadata ('val'), got none: trace the "
            "graph with make_fx or a compiler"
        )
    dtypes = {tensor.dtype for tensor in tensors}
    key = CommKey(
        kind=op.kind,
        group=tuple(_given(comm_node, GROUP)),
        reduce_op=next(map(str, _given(comm_node, REDUCE_OP)), None),
        dtype=dtypes.pop() if len(dtypes) == 1 else None,
        device=tensors[0].device,
    )
    return CommBlock(
        comm_node=comm_node,
        inputs=inputs,
        wait_nodes=waits,
        node_list=(comm_node, *items, *waits, *views),
        outputs=outputs,
        shape=[tensor.shape for tensor in tensors] if op.coalesced else tensors[0].shape,
        key=key,
        num_bytes=comm_bytes(comm_node),
    )


def get_all_comm_blocks(
    graph: fx.Graph,
    comm_ops: Collection[Any] | None = None,
    comm_filter: Callable[[CommBlock], bool] | None = None,
) -> list[CommBlock]:
    """The blocks of a graph in its order: of some operators or of all, if they pass a filter."""
    blocks = []
    for node in graph.nodes:
        chosen = collective(node) is not None and (comm_ops is None or node.target in comm_ops)
        block = get_comm_block(node) if chosen else None
        if block is not None and (comm_filter is None or comm_filter(block)):
            blocks.append(block)
    return blocks


def _given(node: fx.Node, names: tuple[str, ...]) -> Iterator[Any]:
    """The values of some arguments of an operator's node, without those it does not have."""
    for name in names:
        given = operators.argument_of(node, name)
        if given is not None:
            # Ranks are lists, and what is compared must be hashable.
            yield tuple(given) if isinstance(given, list | tuple) else given


def comm_bytes(comm_node: fx.Node) -> int:
    """The larger of what a rank gives and what it gets; symbolic sizes by what they were."""
    given, got = tensors_of(sent_nodes(comm_node)), tensors_of([comm_node])
    return max(sum(map(symbols.num_bytes, given)), sum(map(symbols.num_bytes, got)))


def is_view(node: fx.Node) -> bool:
    """Whether a node only looks at a result in another way, or picks one of several."""
    return node.op == "call_function" and kind(node) in (NodeKind.VIEW, NodeKind.ITEM)


def _arrival(
    comm_node: fx.Node, *, coalesced: bool
) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]] | None:
    """The items and the waits of a collective, in the order of its results."""
    users = list(comm_node.users)
    if not coalesced:
        return ((), tuple(users)) if len(users) == 1 and is_wait(users[0]) else None
    if not users or any(user.target is not operator.getitem for user in users):
        return None
    items = sorted(users, key=_place)
    waits = [user for item in items for user in item.users]
    once = len(set(map(_place, items))) == len(items) == len(waits)
    return (tuple(items), tuple(waits)) if once and all(map(is_wait, waits)) else None


def _place(item: fx.Node) -> int:
    """The place of an item among several results."""
    place: Any = item.args[1]
    return place


def _views(waits: Iterable[fx.Node]) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """The views of some results, and the last of them that other nodes read."""
    views: list[fx.Node] = []
    outputs: dict[fx.Node, None] = {}
    pending = list(waits)
    for node in pending:  # grows
        for user in node.users:
            if not is_view(user):
                outputs[node] = None
            elif user not in views:
                views.append(user)
                pending.append(user)
    return tuple(views), tuple(outputs)
