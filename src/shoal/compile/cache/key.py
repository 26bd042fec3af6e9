"""The key of a compilation: equal only for those whose results are the same.

Nodes of its graph are named by their place, functions by where torch keeps them. Everything is
either described exactly, or the compilation has no key.
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import sys
from collections.abc import Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from shoal._torch import autograd, operators, settings, storage, symbols, traces
from shoal.compile.cache import values
from shoal.compile.cache.errors import NotExactError
from shoal.compile.cache.operators import NAMESPACES
from shoal.compile.cache.values import Json, Reference
from shoal.compile.options import BackendOptions
from shoal.version import __version__

NEUTRAL = frozenset({"cache", "logs", "passes"})
"""Options that change nothing of what is kept: passes run after it is found."""

MODULES = ("torch", "_operator", "operator", "math", "builtins")
"""Whose functions are the same under the same versions of torch and Python."""

HIGHER_ORDER = frozenset({"tag_activation_checkpoint", "autograd_function_apply"})
"""Operators on graphs that are told everything by their arguments; others know more."""


def key_of(
    module: fx.GraphModule, args: Sequence[Any], fixed: Collection[int], options: BackendOptions
) -> str:
    """The key of a graph of Dynamo's; refused if something cannot be described exactly."""
    intercepts = settings.what_intercepts()
    if intercepts is not None:
        raise NotExactError(intercepts)
    if settings.joint_pass() is not None:
        raise NotExactError("a pass over joint graphs is set (joint_custom_pass)")
    described = {
        "versions": versions(),
        "options": {
            field.name: getattr(options, field.name)
            for field in fields(options)
            if field.name not in NEUTRAL
        },
        "state": state_key(args, options),
        "fixed": sorted(fixed),
        "inputs": inputs_key(args),
        "graph": graph_key(module),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def state_key(args: Sequence[Any], options: BackendOptions) -> Json:
    """The state of the process that tracing reads."""
    kinds = {"cpu", *(arg.device.type for arg in args if isinstance(arg, Tensor))}
    grouped = dist.is_available() and dist.is_initialized()
    return {
        "grad": torch.is_grad_enabled(),
        "autocast": settings.autocast_state(kinds),
        "backward_autocast": str(settings.backward_autocast()),
        "budget": settings.memory_budget(),
        "flags": settings.backend_flags(),
        "inductor": settings.inductor_settings() if options.inner == "inductor" else None,
        # Whatever a program made of its rank is a constant of the graph; better safe.
        "rank": [dist.get_rank(), dist.get_world_size()] if grouped else None,
    }


@functools.cache
def versions() -> list[str]:
    """What a graph is traced by: torch, Python, and the compiler itself, by its source."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    try:
        folders = (package / "_torch", package / "compile")
        for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
            digest.update(file.name.encode() + file.read_bytes())
    except OSError as error:
        raise NotExactError(f"the compiler's own source cannot be read: {error}") from error
    python = f"{sys.implementation.name} {sys.version}"
    return [__version__, digest.hexdigest(), python, *settings.compiler_versions()]


def inputs_key(args: Sequence[Any]) -> Json:
    """Arguments of a graph; which of them are one tensor, and which share memory, included."""
    first: dict[int, int] = {}
    memory: dict[int | None, int] = {}
    bases: dict[int, int] = {}
    keys: list[Json] = []
    for i, one in enumerate(args):
        if not isinstance(one, Tensor):
            if isinstance(one, symbols.SYMBOLIC):
                raise NotExactError("it has a size that is not known, whose guards would be lost")
            keys.append(["value", values.encode(one)])
            continue
        _check_plain(one)
        at = first.setdefault(id(one), i)
        shared = memory.setdefault(storage.storage_key(one), i)
        base = bases.setdefault(id(one if one._base is None else one._base), i)
        keys.append([at, shared, base, *_tensor_key(one)])
    return keys


def _check_plain(tensor: Tensor) -> None:
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise NotExactError(f"an input is a tensor of class {type(tensor).__name__}")
    if tensor.layout is not torch.strided or not storage.has_storage(tensor):
        raise NotExactError(f"an input has the layout {tensor.layout}")
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    if any(isinstance(one, symbols.SYMBOLIC) for one in sizes):
        raise NotExactError("it has a size that is not known, whose guards would be lost")


def _tensor_key(tensor: Tensor) -> list[Json]:
    key: list[Json] = [
        str(tensor.dtype),
        list(tensor.shape),
        list(tensor.stride()),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        settings.device_text(tensor.device),
        tensor.requires_grad,
        tensor.is_leaf,
        type(tensor) is torch.nn.Parameter,
        settings.dispatch_text(tensor),
    ]
    base = tensor._base
    if base is not None:
        # Memory that several inputs share is entered by the tensor that they are views of.
        key += [autograd.view_text(tensor), _tensor_key(base)]
    return key


def graph_key(module: fx.GraphModule, *, is_inner: bool = False) -> Json:
    """A graph, with those inside it. Tensors on the module are arguments, but of the outer one."""
    if module.meta.get("_checkpoint_context_fn") is not None:
        raise NotExactError("a checkpoint in it has a context function")
    places = {node: str(number) for number, node in enumerate(module.graph.nodes)}

    def reference(value: Any) -> str | None:
        return places[value] if isinstance(value, fx.Node) else None

    return [_node_key(module, node, reference, is_inner=is_inner) for node in places]


def _node_key(
    module: fx.GraphModule, node: fx.Node, reference: Reference, *, is_inner: bool
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
        return [node.op, _attribute_key(module, str(node.target), is_inner=is_inner)]
    raise NotExactError(f"its node {node.name} is a {node.op} of {node.target}")


def _number_key(node: fx.Node) -> list[Json]:
    """What a number is that the graph gets as a tensor, if it holds for that one alone."""
    value = node.meta.get("example_value")
    if not isinstance(value, symbols.SYMBOLIC):
        return []
    number = symbols.known_number(value)
    if number is None:
        raise NotExactError(f"its number {node.name} differs from call to call")
    return [values.encode(number)]


def _argument_key(value: Any, reference: Reference) -> Json:
    """An argument, which here may be a function too, such as a built-in type."""
    if callable(value) and reference(value) is None:
        return {"function": function_name(value)}
    return values.encode(value, reference)


def _attribute_key(module: fx.GraphModule, path: str, *, is_inner: bool) -> Json:
    """What a graph finds on its module: a graph, or a tensor, which is one of the arguments."""
    value = traces.attribute(module, path)
    if isinstance(value, Tensor):
        if is_inner:
            raise NotExactError("a graph inside it holds a tensor")
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
