"""Where the results of nodes lie."""

from __future__ import annotations

import operator

import torch
from torch import fx

from shoal.compile.passes.dependencies import Dependencies


def test_results_are_counted_with_the_numbers_between_them() -> None:
    """CUDA's attention returns tensors, nothing, two numbers, and tensors again."""
    graph = fx.Graph()
    query = graph.placeholder("query")
    query.meta["val"] = torch.empty(1, 1, 2, 2)
    attention = graph.call_function(
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        (query, query, query, None, True),
    )
    tensor = torch.empty(2)
    attention.meta["val"] = (tensor, tensor, None, None, 2, 2, tensor, tensor, tensor)
    items = []
    for place in (0, 1, 6, 7):
        item = graph.call_function(operator.getitem, (attention, place))
        item.meta["val"] = tensor
        items.append(item)
    length = graph.call_function(operator.getitem, (attention, 4))
    length.meta["val"] = 2
    graph.output((*items, length))

    found = Dependencies(graph)

    assert len({found.memory(item) for item in items}) == len(items)
    assert found.memory(attention) >= frozenset().union(*map(found.memory, items))
    assert not found.memory(length)


def test_items_of_items() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)
    pieces = graph.call_function(torch.ops.aten.split.Tensor, (x, 2))
    pieces.meta["val"] = list(torch.empty(4).split(2))
    both = graph.call_function(operator.getitem, (pieces, slice(0, 2)))
    both.meta["val"] = list(torch.empty(4).split(2))
    last = graph.call_function(operator.getitem, (both, 1))
    last.meta["val"] = torch.empty(2)
    graph.output(last)

    found = Dependencies(graph)

    assert found.memory(last) == found.memory(x)
