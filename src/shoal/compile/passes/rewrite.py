"""New nodes for a graph, with metadata from the start."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from shoal.compile.node_kinds import value
from shoal.compile.passes.metadata import compute_metadata

aten = torch.ops.aten


def call_function(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> fx.Node:
    """A new call where the graph inserts now, that says what it gives."""
    if not callable(target):
        raise TypeError(f"expected an operator or a function to call, got {target!r}")
    node = graph.call_function(target, args, None if kwargs is None else dict(kwargs))
    compute_metadata(node)
    return node


def call_again(graph: fx.Graph, node: fx.Node, first: Any, target: Any = None) -> fx.Node:
    """The call of another node with another first argument, or of another operator with it."""
    chosen: Any = target if target is not None else node.target
    if node.args:
        new = call_function(graph, chosen, (first, *node.args[1:]), node.kwargs)
    else:
        name = next(iter(node.kwargs))
        new = call_function(graph, chosen, (), {**node.kwargs, name: first})
    if "stack_trace" in node.meta:
        new.meta["stack_trace"] = node.meta["stack_trace"]
    return new


def call_instead(node: fx.Node, target: Any, args: tuple[Any, ...], **kwargs: Any) -> fx.Node:
    """A new call before a node that it helps to replace, said to have run where that one did."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, args, kwargs)
    new.meta = {key: one for key, one in node.meta.items() if key not in ("val", "tensor_meta")}
    compute_metadata(new, getattr(value(node), "fake_mode", None))
    return new


def move_block_after(block: Iterable[fx.Node], target_node: fx.Node) -> None:
    """Put nodes right after another one, in the order given."""
    for node in block:
        target_node.append(node)
        target_node = node


def move_block_before(block: Iterable[fx.Node], target_node: fx.Node) -> None:
    """Put nodes right before another one, in the order given."""
    for node in block:
        target_node.prepend(node)


def sizes(graph: fx.Graph, node: fx.Node) -> list[Any]:
    """The sizes of a node's tensor: integers, and nodes for those that are symbolic."""
    return [
        size if isinstance(size, int) else call_function(graph, aten.sym_size.int, (node, dim))
        for dim, size in enumerate(value(node).shape)
    ]


def compute(graph: fx.Graph, op: Callable[[Any, Any], Any], size: Any, other: Any) -> Any:
    """The result of an operation on two sizes, each an integer or a node."""
    if isinstance(size, int) and isinstance(other, int):
        return op(size, other)
    return call_function(graph, op, (size, other))


def reshape(graph: fx.Graph, node: fx.Node, shape: list[Any]) -> fx.Node:
    """A tensor in another shape, whose sizes are integers or nodes."""
    return call_function(graph, aten.reshape.default, (node, shape))


def flatten(graph: fx.Graph, node: fx.Node, like: fx.Node) -> fx.Node:
    """The elements of a tensor in one row, in the order in which `like` has them in memory."""
    dims = _dims_in_memory(value(like))
    if dims is not None:
        node = call_function(graph, aten.permute.default, (node, dims))
    if value(node).dim() == 1:
        return node
    return call_function(graph, aten.flatten.using_ints, (node,))


def unflatten(graph: fx.Graph, row: fx.Node, shape: list[Any], like: fx.Node) -> fx.Node:
    """A row as a tensor of a shape, with the strides of `like`."""
    dims = _dims_in_memory(value(like))
    if dims is None:
        return row if len(shape) == 1 else reshape(graph, row, shape)
    row = reshape(graph, row, [shape[dim] for dim in dims])
    back = [dims.index(dim) for dim in range(len(dims))]
    return call_function(graph, aten.permute.default, (row, back))


def split(graph: fx.Graph, node: fx.Node, lengths: list[Any], dim: int = 0) -> list[fx.Node]:
    """The pieces of a tensor, of some lengths."""
    pieces = call_function(graph, aten.split_with_sizes.default, (node, lengths, dim))
    return [call_function(graph, operator.getitem, (pieces, i)) for i in range(len(lengths))]


def _dims_in_memory(tensor: Tensor) -> list[int] | None:
    """The dimensions of a dense tensor from slow to fast; None where that is their order anyway.

    A transposed gradient keeps its strides this way, and is put in a row without a copy.
    """
    if not all(isinstance(one, int) for one in (*tensor.shape, *tensor.stride())):
        return None
    if tensor.is_contiguous():
        return None
    dims = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return dims if tensor.permute(dims).is_contiguous() else None
