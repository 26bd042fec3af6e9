"""Which nodes of a graph communicate, by the table of `comm/collectives.py`.

An operator is known by its schema's name (`_c10d_functional::all_reduce`), never by the name of a
node: those are the tracer's choice.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from shoal._torch import operators
from shoal.comm.collectives import OPERATORS, Operator
from shoal.compile.node_kinds import nodes_in, op_name
from shoal.errors import UsageError


def collective(node: fx.Node) -> Operator | None:
    """The collective that a node calls; None if it calls none."""
    return OPERATORS.get(op_name(node))


def sent_nodes(node: fx.Node) -> tuple[fx.Node, ...]:
    """The tensors, or lists of tensors, that a collective's node is given to send."""
    op = collective(node)
    given = list(operators.schema_arguments(node))
    if op is None or not given:
        return ()
    chosen = [one for argument, one in given if argument.name == op.reads] or [given[0][1]]
    return tuple(nodes_in(chosen[0]))


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
