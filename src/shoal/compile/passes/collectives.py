"""Which nodes of a graph communicate, by the table of `comm/collectives.py`.

An operator is known by its schema's name (`_c10d_functional::all_reduce`), never by the name of a
node: those are the tracer's choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from shoal._torch import operators
from shoal.comm.collectives import OPERATORS, WAITS, Operator
from shoal.comm.collectives import Kind as CommKind  # a node has a Kind of its own
from shoal.compile.node_kinds import flat, op_name
from shoal.errors import UsageError

REDUCE_OP = ("reduce_op", "reduceOp")
GROUP = ("group_name", "process_group", "tag", "ranks")

__all__ = [
    "GROUP",
    "REDUCE_OP",
    "CommKind",
    "collective",
    "first_given",
    "group_size",
    "is_wait",
    "sent_nodes",
    "variant",
]


def collective(node: fx.Node) -> Operator | None:
    """What a node communicates; None if it does not."""
    return OPERATORS.get(op_name(node))


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
