"""Nodes of a captured graph: what kind of work they do, what they read and give."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx

from shoal._torch import operators
from shoal.comm import collectives

Symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
"""Values that are kept as they are instead of as tensors; constants where shapes are static."""


class NodeKind(Enum):
    """The work of a node, as far as it matters for computing it again."""

    INPUT = "an input"
    CONSTANT = "a constant of the module"
    ITEM = "one of several results"
    SIZE = "arithmetic on sizes"
    VIEW = "another view of memory that is there"
    CHEAP = "work that fuses into its neighbours"
    REDUCTION = "a reduction that fuses into what it reads"
    EXPENSIVE = "work worth keeping, or unknown"
    RANDOM = "random numbers"
    COLLECTIVE = "communication"
    EFFECT = "something the outside can see"
    MUTATION = "a write into memory that is there"


def _named(namespace: str, names: str) -> frozenset[str]:
    """Full names of the operators of a namespace, given with blanks between them."""
    return frozenset(f"{namespace}::{name}" for name in names.split())


SIZES = _named("aten", "sym_size sym_stride sym_numel sym_storage_offset")

# No views by their schemas, since autograd must not see them as such; they move no bytes.
VIEWS = _named("aten", "_unsafe_view lift_fresh _reshape_alias reshape")

CHEAP = _named(
    "aten",
    """
    _to_copy to type_as clone lift_fresh_copy copy contiguous
    full full_like zeros zeros_like ones ones_like new_zeros
    new_ones new_full new_empty empty empty_like scalar_tensor arange
    index gather triu tril flip roll constant_pad_nd cat stack
    _grad_sum_to_size sum_to_size broadcast_tensors masked_fill rsub
    softplus threshold clamp where lerp addcmul addcdiv
    """,
) | _named("prims", "convert_element_type broadcast_in_dim iota where clone device_put")

COPIES = frozenset({"aten::_to_copy", "aten::to", "prims::device_put"})

REDUCTIONS = _named(
    "aten",
    """
    sum mean amax amin max min argmax argmin var std
    var_mean std_mean any all logsumexp prod
    """,
) | _named("prims", "sum var amax amin prepare_softmax_online")


def op_name(node: fx.Node) -> str:
    """The operator of a node without its overload (`aten::add`); empty where it calls none."""
    if not isinstance(node.target, operators.OpOverload):
        return ""
    return node.target.name().split(".")[0]


def flat(values: Any) -> Iterator[Any]:
    """The values in lists and tuples, however deep."""
    if isinstance(values, list | tuple):
        for one in values:
            yield from flat(one)
    else:
        yield values


def nodes_in(values: Any) -> list[fx.Node]:
    """The nodes in lists and tuples, however deep."""
    return [one for one in flat(values) if isinstance(one, fx.Node)]


def closure(
    roots: Iterable[fx.Node], inputs: Callable[[fx.Node], Iterable[fx.Node]]
) -> set[fx.Node]:
    """Some nodes, and all that they are made of; `inputs` says where that ends."""
    found: set[fx.Node] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(inputs(node))
    return found


def value(node: fx.Node) -> Any:
    """The value of a node, without its elements (`node.meta["val"]`)."""
    return node.meta.get("val")


def tensors_of(nodes: Iterable[fx.Node]) -> list[Tensor]:
    """The tensors that nodes give, without their elements."""
    return [one for node in nodes for one in flat(value(node)) if isinstance(one, Tensor)]


def is_tensor(node: fx.Node) -> bool:
    """Whether a node gives one tensor."""
    return isinstance(value(node), Tensor)


def is_symbolic(node: fx.Node) -> bool:
    """Whether a node gives a number that is no tensor."""
    return isinstance(value(node), Symbolic)


def aliased_arguments(node: fx.Node, *, written: bool) -> list[Any]:
    """The arguments that an operator may return or write to, by its schema; or those it writes."""
    return [
        given
        for argument, given in operators.schema_arguments(node)
        if argument.alias_info is not None and (argument.alias_info.is_write or not written)
    ]


def mutated_inputs(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory a node writes to, also those that it is given in lists."""
    return nodes_in(aliased_arguments(node, written=True))


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective."""
    return op_name(node) in collectives.WAITS


def communicates(node: fx.Node) -> bool:
    """Whether a node's operator is of a collective, whether or not it writes to its input."""
    target = node.target
    return isinstance(target, operators.OpOverload) and target.namespace in collectives.NAMESPACES


def kind(node: fx.Node) -> NodeKind:
    """The kind of work that a node does."""
    if node.op == "placeholder":
        return NodeKind.INPUT
    if node.op == "get_attr":
        return NodeKind.CONSTANT
    target = node.target
    if isinstance(target, operators.OpOverload):
        return _kind_of_op(node, target)
    if target is operator.getitem:
        return NodeKind.ITEM
    if target is torch.ops.higher_order.with_effects:
        return NodeKind.EFFECT
    if is_symbolic(node):
        return NodeKind.SIZE
    return NodeKind.EFFECT if node.is_impure() else NodeKind.EXPENSIVE


def _kind_of_op(node: fx.Node, op: operators.OpOverload) -> NodeKind:
    name = op_name(node)
    if mutated_inputs(node):
        return NodeKind.MUTATION
    if op.namespace in collectives.NAMESPACES:
        return NodeKind.COLLECTIVE
    if _is_random(node, op):
        return NodeKind.RANDOM
    if name in SIZES:
        return NodeKind.SIZE
    if name in VIEWS or operators.is_view_op(op):
        return NodeKind.VIEW
    if torch.Tag.nondeterministic_seeded not in op.tags and node.is_impure():
        return NodeKind.EFFECT
    if name in REDUCTIONS:
        return NodeKind.REDUCTION
    if (name in CHEAP or torch.Tag.pointwise in op.tags) and not _changes_device(node):
        return NodeKind.CHEAP
    return NodeKind.EXPENSIVE


def _changes_device(node: fx.Node) -> bool:
    """Whether a node copies between devices: no kernel does that on the way."""
    if op_name(node) not in COPIES or not is_tensor(node):
        return False
    # A number has no device: vmap makes tensors of numbers by these operators.
    return any(one.device != value(node).device for one in tensors_of(node.all_input_nodes))


def _is_random(node: fx.Node, op: operators.OpOverload) -> bool:
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    # Attention declares random numbers even where it drops nothing.
    return operators.argument_of(node, "dropout_p") != 0
