"""Which operators communicate.

An operator is known by its schema's name (`_c10d_functional::all_reduce`), never by the name of a
node: those are the tracer's choice. What a release of torch lacks is a row that never matches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import fx

from shoal._torch import operators
from shoal.compile.node_kinds import flat, op_name
from shoal.errors import UsageError

WAITS = frozenset({"_c10d_functional::wait_tensor", "c10d_functional::wait_tensor"})
REDUCE_OP = ("reduce_op", "reduceOp")
GROUP = ("group_name", "process_group", "tag", "ranks")


class CommKind(Enum):
    """What a collective does to the data of the ranks."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    POINT_TO_POINT = "point-to-point"
    BARRIER = "barrier"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """What is known of an operator that communicates."""

    kind: CommKind
    coalesced: bool = False
    """Takes several tensors and gives several."""
    writes: bool = False
    """Its results lie in memory that it is given."""
    awaited: bool = True
    """Its results are there after a wait in the graph; without, it ends before the next node."""
    reads: str | None = None
    """The argument that is sent; None means the first."""


def _functional() -> dict[str, Collective]:
    reduce, gather, scatter = CommKind.ALL_REDUCE, CommKind.ALL_GATHER, CommKind.REDUCE_SCATTER
    ops = {
        "all_reduce": Collective(kind=reduce),
        "all_reduce_": Collective(kind=reduce, writes=True),
        "all_reduce_coalesced": Collective(kind=reduce, coalesced=True),
        "all_reduce_coalesced_": Collective(kind=reduce, coalesced=True, writes=True),
        "all_gather_into_tensor": Collective(kind=gather),
        "all_gather_into_tensor_out": Collective(kind=gather, writes=True),
        "all_gather_into_tensor_coalesced": Collective(kind=gather, coalesced=True),
        "reduce_scatter_tensor": Collective(kind=scatter),
        "reduce_scatter_tensor_out": Collective(kind=scatter, writes=True),
        "reduce_scatter_tensor_coalesced": Collective(kind=scatter, coalesced=True),
        "all_to_all_single": Collective(kind=CommKind.ALL_TO_ALL),
        "broadcast": Collective(kind=CommKind.BROADCAST),
        "broadcast_": Collective(kind=CommKind.BROADCAST, writes=True),
        "isend": Collective(kind=CommKind.POINT_TO_POINT),
        "irecv": Collective(kind=CommKind.POINT_TO_POINT),
        "batch_p2p_ops": Collective(
            kind=CommKind.POINT_TO_POINT, coalesced=True, writes=True, reads="tensors"
        ),
    }
    spaces = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
    return {f"{space}::{name}": op for space in spaces for name, op in ops.items()}


def _legacy() -> dict[str, Collective]:
    """The operators under `torch.distributed`'s own calls: they write, and wait for themselves."""
    sent = {
        "allreduce_": (CommKind.ALL_REDUCE, None),
        "allreduce_coalesced_": (CommKind.ALL_REDUCE, None),
        "allgather_": (CommKind.ALL_GATHER, "input_tensors"),
        "_allgather_base_": (CommKind.ALL_GATHER, "input_tensor"),
        "allgather_coalesced_": (CommKind.ALL_GATHER, "input_list"),
        "allgather_into_tensor_coalesced_": (CommKind.ALL_GATHER, "inputs"),
        "reduce_scatter_": (CommKind.REDUCE_SCATTER, "input_tensors"),
        "_reduce_scatter_base_": (CommKind.REDUCE_SCATTER, "input_tensor"),
        "reduce_scatter_tensor_coalesced_": (CommKind.REDUCE_SCATTER, "inputs"),
        "alltoall_": (CommKind.ALL_TO_ALL, "input_tensors"),
        "alltoall_base_": (CommKind.ALL_TO_ALL, "input"),
        "broadcast_": (CommKind.BROADCAST, None),
        "reduce_": (CommKind.REDUCE, None),
        "gather_": (CommKind.GATHER, "input_tensors"),
        "scatter_": (CommKind.SCATTER, "input_tensors"),
        "send": (CommKind.POINT_TO_POINT, None),
        "recv_": (CommKind.POINT_TO_POINT, None),
        "recv_any_source_": (CommKind.POINT_TO_POINT, None),
        "barrier": (CommKind.BARRIER, None),
        "monitored_barrier_": (CommKind.BARRIER, None),
    }
    return {
        f"c10d::{name}": Collective(
            kind=kind, coalesced=True, writes=True, awaited=False, reads=reads
        )
        for name, (kind, reads) in sent.items()
    }


COLLECTIVES = {
    **_functional(),
    **_legacy(),
    "_dtensor::shard_dim_alltoall": Collective(kind=CommKind.ALL_TO_ALL, awaited=False),
}


def collective(node: fx.Node) -> Collective | None:
    """What a node communicates; None if it does not."""
    return COLLECTIVES.get(op_name(node))


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective."""
    return op_name(node) in WAITS


def sent_nodes(node: fx.Node) -> tuple[fx.Node, ...]:
    """The tensors, or lists of tensors, that a collective's node is given to send."""
    op = collective(node)
    given = list(operators.schema_arguments(node))
    if op is None or not given:
        return ()
    chosen = [one for argument, one in given if argument.name == op.reads] or [given[0][1]]
    return tuple(one for one in flat(chosen[0]) if isinstance(one, fx.Node))


def first_given(node: fx.Node, names: tuple[str, ...]) -> Iterator[Any]:
    """What an operator's node is given for those of some arguments that it has."""
    for name in names:
        given = operators.argument_of(node, name)
        if given is not None:
            # Ranks are lists, and what is compared must be hashable.
            yield tuple(given) if isinstance(given, list | tuple) else given


def group_size(node: fx.Node) -> int:
    """Over how many ranks a node gathers or scatters."""
    size = operators.argument_of(node, "group_size")
    if not isinstance(size, int):
        raise UsageError(f"expected a node with a group size, got {node.name} ({node.target})")
    return size


def variant(node: fx.Node, name: str) -> Any:
    """The operator of another name that takes what a collective's takes."""
    if not isinstance(node.target, operators.OpOverload):
        raise UsageError(f"expected the node of a collective, got {node.name} ({node.target})")
    return operators.operator_named(f"{node.target.namespace}.{name}.default")
