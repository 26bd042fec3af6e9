"""What kind of work a node of a captured graph does."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx

from shoal._torch import operators
from shoal.comm import collectives

Symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
"""Values that are kept as they are instead of as tensors; constants where shapes are static."""


class Kind(Enum):
    """What a node does, as far as it matters for computing it again."""

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


SIZES = frozenset(
    f"aten::{name}" for name in ("sym_size", "sym_stride", "sym_numel", "sym_storage_offset")
)

VIEWS = frozenset(
    # No views by their schemas, since autograd must not see them as such; they move no bytes.
    f"aten::{name}"
    for name in ("_unsafe_view", "lift_fresh", "_reshape_alias", "reshape")
)

CHEAP = frozenset(
    f"aten::{name}"
    for name in (
        *("_to_copy", "to", "type_as", "clone", "lift_fresh_copy", "copy", "contiguous"),
        *("full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "new_zeros"),
        *("new_ones", "new_full", "new_empty", "empty", "empty_like", "scalar_tensor", "arange"),
        *("index", "gather", "triu", "tril", "flip", "roll", "constant_pad_nd", "cat", "stack"),
        *("_grad_sum_to_size", "sum_to_size", "broadcast_tensors", "masked_fill", "rsub"),
        *("softplus", "threshold", "clamp", "where", "lerp", "addcmul", "addcdiv"),
    )
) | frozenset(
    f"prims::{name}"
    for name in ("convert_element_type", "broadcast_in_dim", "iota", "where", "clone", "device_put")
)

COPIES = frozenset({"aten::_to_copy", "aten::to", "prims::device_put"})

REDUCTIONS = frozenset(
    f"aten::{name}"
    for name in (
        *("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "var", "std"),
        *("var_mean", "std_mean", "any", "all", "logsumexp", "prod"),
    )
) | frozenset(f"prims::{name}" for name in ("sum", "var", "amax", "amin", "prepare_softmax_online"))


def op_name(node: fx.Node) -> str:
    """The operator of a node without its overload (`aten::add`); empty where it calls none."""
    if not isinstance(node.target, operators.OpOverload):
        return ""
    return node.target.name().split(".")[0]


def flat(values: Any) -> Iterator[Any]:
    """What is in lists and tuples, however deep."""
    if isinstance(values, list | tuple):
        for one in values:
            yield from flat(one)
    else:
        yield values


def value(node: fx.Node) -> Any:
    """What a node gives, without its elements."""
    return node.meta.get("val")


def is_tensor(node: fx.Node) -> bool:
    """Whether a node gives one tensor."""
    return isinstance(value(node), Tensor)


def is_symbolic(node: fx.Node) -> bool:
    """Whether a node gives a number that is no tensor."""
    return isinstance(value(node), Symbolic)


def mutated_inputs(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory a node writes to."""
    return [
        given
        for argument, given in operators.schema_arguments(node)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and isinstance(given, fx.Node)
    ]


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective."""
    return op_name(node) in collectives.WAITS


def communicates(node: fx.Node) -> bool:
    """Whether a node's operator is of a collective, whether or not it writes to its input."""
    target = node.target
    return isinstance(target, operators.OpOverload) and target.namespace in collectives.NAMESPACES


def kind(node: fx.Node) -> Kind:
    """What a node does."""
    if node.op == "placeholder":
        return Kind.INPUT
    if node.op == "get_attr":
        return Kind.CONSTANT
    target = node.target
    if isinstance(target, operators.OpOverload):
        return _kind_of_op(node, target)
    if target is operator.getitem:
        return Kind.ITEM
    if target is torch.ops.higher_order.with_effects:
        return Kind.EFFECT
    if is_symbolic(node):
        return Kind.SIZE
    return Kind.EFFECT if node.is_impure() else Kind.EXPENSIVE


def _kind_of_op(node: fx.Node, op: operators.OpOverload) -> Kind:
    name = op_name(node)
    if mutated_inputs(node):
        return Kind.MUTATION
    if op.namespace in collectives.NAMESPACES:
        return Kind.COLLECTIVE
    if _is_random(node, op):
        return Kind.RANDOM
    if name in SIZES:
        return Kind.SIZE
    if name in VIEWS or operators.is_view_op(op):
        return Kind.VIEW
    if torch.Tag.nondeterministic_seeded not in op.tags and node.is_impure():
        return Kind.EFFECT
    if name in REDUCTIONS:
        return Kind.REDUCTION
    if (name in CHEAP or torch.Tag.pointwise in op.tags) and not _changes_device(node):
        return Kind.CHEAP
    return Kind.EXPENSIVE


def _changes_device(node: fx.Node) -> bool:
    """Whether a node copies between devices: no kernel does that on the way."""
    if op_name(node) not in COPIES or not is_tensor(node):
        return False
    # A number has no device: vmap makes tensors of numbers by these operators.
    read = (one for one in node.all_input_nodes if is_tensor(one))
    return any(value(one).device != value(node).device for one in read)


def _is_random(node: fx.Node, op: operators.OpOverload) -> bool:
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    # Attention declares random numbers even where it drops nothing.
    return operators.argument_of(node, "dropout_p") != 0
