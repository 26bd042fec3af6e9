"""What the metadata of a graph says, computed again and compared."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from shoal import _torch_compile
from shoal.compile.partition.ops import flat, value
from shoal.compile.passes.collectives import collective
from shoal.errors import InvariantError, UsageError

BY_CONTENT = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
"""The shapes of such results are new symbols each time they are asked for."""


def compute_metadata(node: fx.Node) -> None:
    """Write down what a node gives: `val`, a value without elements, and `tensor_meta`."""
    node.meta["val"] = result_of(node)
    node.meta["tensor_meta"] = _torch_compile.tensor_metadata(node.meta["val"])


def result_of(node: fx.Node) -> Any:
    """What a node gives, computed without elements from the metadata of what it is given."""
    target: Any = node.target
    mode = _mode_of(node)
    args, kwargs = map_arg((node.args, node.kwargs), _value_in(mode))  # pyright: ignore[reportGeneralTypeIssues]
    if mode is None:
        return target(*args, **kwargs)
    with _torch_compile.below_python(mode), torch.no_grad():
        result = target(*args, **kwargs)
        return _as_received(result) if _gives_new_tensors(node) else result


def inconsistencies(graph: fx.Graph) -> dict[fx.Node, str]:
    """The nodes whose metadata says something else than what they would give, and what."""
    found = {}
    for node in graph.nodes:
        if _can_be_computed(node):
            said, computed = _describe(value(node)), _describe(result_of(node))
            if len(said) != len(computed) or not all(map(_agree, said, computed)):
                found[node] = f"{node.name} ({node.target}) says {said}, and gives {computed}"
    return found


def check_graph(graph: fx.Graph, known: dict[fx.Node, str] | None = None) -> None:
    """Raise unless each node stands after what it reads, and says what it gives.

    `known` are inconsistencies that were there before.
    """
    graph.lint()
    new = [what for node, what in inconsistencies(graph).items() if node not in (known or {})]
    if new:
        raise InvariantError(
            f"the metadata of {len(new)} nodes is wrong after a pass; first: {new[0]}"
        )


def _gives_new_tensors(node: fx.Node) -> bool:
    op = collective(node)
    return op is not None and not op.writes


def _as_received(result: Any) -> Any:
    """What a collective gives is contiguous, though torch says of some that strides are kept."""
    if isinstance(result, list | tuple):
        return type(result)(map(_as_received, result))
    if not isinstance(result, Tensor):
        return result
    return torch.empty_like(result, memory_format=torch.contiguous_format)


def _mode_of(node: fx.Node) -> _torch_compile.FakeTensorMode | None:
    """The mode in which to compute a node; a new one where its inputs disagree."""
    tensors = [
        one for read in node.all_input_nodes for one in flat(value(read)) if isinstance(one, Tensor)
    ]
    modes = {getattr(one, "fake_mode", None) for one in tensors}
    if len(modes) == 1:
        mode = modes.pop()
        if mode is not None:
            return mode
    return _torch_compile.new_fake_mode(dynamic=False) if tensors else None


def _value_in(mode: _torch_compile.FakeTensorMode | None) -> Callable[[fx.Node], Any]:
    """How to read a node's value in a mode: a trace of real tensors makes one mode for each."""

    def read(node: fx.Node) -> Any:
        if "val" not in node.meta:
            raise UsageError(
                f"expected what {node.name} gives in its metadata ('val'), got none: trace the "
                "graph with make_fx or a compiler"
            )
        held = node.meta["val"]
        if isinstance(held, list | tuple):
            return type(held)(map(convert, held))
        return convert(held)

    def convert(held: Any) -> Any:
        if not isinstance(held, Tensor) or getattr(held, "fake_mode", None) is mode:
            return held
        assert mode is not None
        with mode:
            return torch.empty_strided(
                held.shape, held.stride(), dtype=held.dtype, device=held.device
            )

    return read


def _can_be_computed(node: fx.Node) -> bool:
    if node.op != "call_function" or "val" not in node.meta:
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, _torch_compile.OpOverload):
        return False
    known = all("val" in read.meta for read in node.all_input_nodes)
    return known and BY_CONTENT.isdisjoint(node.target.tags)


def _describe(held: Any) -> list[Any]:
    """Type, device, sizes and strides of each tensor; strides only where they mean something."""
    return [
        (one.dtype, one.device, tuple(one.shape), _strides(one)) if isinstance(one, Tensor) else one
        for one in flat(held)
    ]


def _strides(tensor: Tensor) -> tuple[Any, ...]:
    if any(isinstance(size, int) and size == 0 for size in tensor.shape):
        return ()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(0 if isinstance(size, int) and size == 1 else step for size, step in pairs)


def _agree(said: Any, computed: Any) -> bool:
    """Whether two descriptions are the same, as far as integers can tell."""
    if isinstance(said, tuple) and isinstance(computed, tuple):
        return len(said) == len(computed) and all(map(_agree, said, computed))
    if isinstance(said, _torch_compile.SYMBOLIC) or isinstance(computed, _torch_compile.SYMBOLIC):
        return True
    return said == computed
