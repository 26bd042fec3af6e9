"""A graph of Dynamo's as canonical data: equal for graphs that do the same.

Nodes are named by their place, functions by where torch keeps them. Everything in a graph is either
described exactly, or the graph has no key.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from shoal._torch import operators, symbols, traces
from shoal.compile.cache import values
from shoal.compile.cache.errors import NotExactError
from shoal.compile.cache.operators import NAMESPACES
from shoal.compile.cache.values import Json

MODULES = ("torch", "_operator", "operator", "math", "builtins")
"""Whose functions are the same under the same versions of torch and Python."""

HIGHER_ORDER = frozenset({"tag_activation_checkpoint", "autograd_function_apply"})
"""Operators on graphs that are told everything by their arguments; others know more."""


def graph_key(module: fx.GraphModule, *, is_inner: bool = False) -> Json:
    """A graph, with those inside it. Tensors on the module are arguments, but of the outer one."""
    if module.meta.get("_checkpoint_context_fn") is not None:
        raise NotExactError("a checkpoint in it has a context function")
    places = {node: number for number, node in enumerate(module.graph.nodes)}

    def reference(value: Any) -> str | None:
        if isinstance(value, fx.Node):
            return str(places[value])
        return None

    nodes = list(module.graph.nodes)
    if is_inner and any(
        isinstance(traces.attribute(module, str(node.target)), Tensor)
        for node in nodes
        if node.op == "get_attr"
    ):
        raise NotExactError("a graph inside it holds a tensor")
    return [_node_key(module, node, reference) for node in nodes]


def _node_key(
    module: fx.GraphModule, node: fx.Node, reference: Callable[[Any], str | None]
) -> Json:
    if "recompute" in node.meta:
        raise NotExactError(f"its node {node.name} is tagged by hand to be computed again")
    given = [
        [_argument_key(arg, reference) for arg in node.args],
        [[name, _argument_key(arg, reference)] for name, arg in node.kwargs.items()],
    ]
    given += _number_key(node)
    if node.op in ("placeholder", "output"):
        return [node.op, *given]
    if node.op == "call_method":
        return [node.op, str(node.target), *given]
    if node.op == "call_function":
        return [node.op, function_name(node.target), *given]
    if node.op == "get_attr":
        return [node.op, _attribute_key(module, str(node.target))]
    raise NotExactError(f"its node {node.name} is a {node.op} of {node.target}")


def _number_key(node: fx.Node) -> list[Json]:
    """What a number is that the graph gets as a tensor, if it holds for that one alone."""
    value = node.meta.get("example_value")
    if not isinstance(value, symbols.SYMBOLIC):
        return []
    number = symbols.known_number(value)
    if number is None:
        raise NotExactError(f"its number {node.name} differs from call to call")
    return [values.encode(number, lambda _: None)]


def _argument_key(value: Any, reference: Callable[[Any], str | None]) -> Json:
    """An argument, which here may be a function too, such as a built-in type."""
    if callable(value) and reference(value) is None:
        return {"function": function_name(value)}
    return values.encode(value, reference)


def _attribute_key(module: fx.GraphModule, path: str) -> Json:
    """What a graph finds on its module: a graph, or a tensor, which is one of the arguments."""
    value = traces.attribute(module, path)
    if isinstance(value, Tensor):
        return {"tensor": path}
    if isinstance(value, fx.GraphModule):
        return graph_key(value, is_inner=True)
    return values.encode(value)


def function_name(target: Any) -> str:
    """Where torch or Python keeps a function; refused if that is nowhere."""
    if isinstance(target, operators.OpOverload):
        if target.namespace not in NAMESPACES:
            raise NotExactError(
                f"it calls {target}, whose derivative and shapes are code that no key can hold"
            )
        return f"{target} {operators.schema_of(target)}"
    if isinstance(target, operators.OpOverloadPacket):
        return ", ".join(function_name(getattr(target, one)) for one in sorted(target.overloads()))
    if isinstance(target, operators.HigherOrderOperator):
        if target.name() not in HIGHER_ORDER:
            raise NotExactError(f"it calls the higher-order operator {target.name()}")
        return f"higher_order.{target.name()}"
    for path in _paths(target):
        if path.split(".")[0] in MODULES and _found(path) is target:
            return path
    raise NotExactError(f"it calls {target!r}, which is no function of torch's or Python's own")


def _paths(target: Any) -> list[str]:
    """Where a function may be, by what it says of itself; those of C++ say it in several ways."""
    module = getattr(target, "__module__", None) or "torch._C"
    names = [getattr(target, key, None) for key in ("__qualname__", "__name__")]
    return [f"{module}.{name}" for name in names if isinstance(name, str)]


def _found(path: str) -> Any:
    """What stands under a path: in the module with the longest name that is loaded."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:length]))
        if found is None:
            continue
        try:
            return operator.attrgetter(".".join(parts[length:]))(found)
        except AttributeError:
            return None
    return None
