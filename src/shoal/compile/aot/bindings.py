"""Operators as the Python functions that torch generates for them.

Both reach the same kernel. The function of an operator (`torch.mm` for `aten.mm.default`) parses
its arguments in less time than the operator does, which looks at a schema: 0.4 to 1 µs a call.
Where an overload is the one that the function chooses for its arguments is known for those listed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph

from shoal._torch import operators
from shoal.compile.partition.ops import mutated_inputs

_FUNCTIONS = """
    _native_batch_norm_legit.default _softmax.default add.Tensor addmm.default bmm.default
    cat.default clone.default detach.default div.Tensor embedding.default flatten.using_ints
    mean.dim mm.default mul.Tensor native_dropout.default native_layer_norm.default permute.default
    pow.Tensor_Scalar relu.default reshape.default rsqrt.default select.int split_with_sizes.default
    sub.Tensor sum.dim_IntList t.default transpose.int unsqueeze.default
"""
_METHODS = "add_.Tensor copy_.default div_.Tensor expand.default mul_.Tensor view.default"

UNCOUNTED = frozenset({operators.operator_named("aten._native_batch_norm_legit.default")})
"""What writes past the version counters of its arguments."""


def _bindings() -> dict[Any, Callable[..., Any]]:
    listed = [(torch, name) for name in _FUNCTIONS.split()]
    listed += [(torch.Tensor, name) for name in _METHODS.split()]
    return {
        operators.operator_named(f"aten.{name}"): getattr(owner, name.partition(".")[0])
        for owner, name in listed
    }


BINDINGS = _bindings()
"""By operator the function that calls it."""


def bound(op: operators.OpOverload) -> Callable[..., Any]:
    """What to call for an operator."""
    return BINDINGS.get(op) or operators.straight(op)


def writes_uncounted(graph: Graph) -> set[int]:
    """The inputs of a graph that are written to past their version counters, and not otherwise."""
    found: set[int] = set()
    for at, node in enumerate(graph.find_nodes(op="placeholder")):
        writers = [user.target for user in node.users if node in mutated_inputs(user)]
        if writers and all(one in UNCOUNTED for one in writers):
            found.add(at)
    return found
