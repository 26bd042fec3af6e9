"""Graphs as Python code."""

from __future__ import annotations

import torch
from torch import fx

from shoal.compile.aot.graph_code import DirectGraph


def test_methods_get_their_keywords() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_method("sum", (x,), {"dim": 0, "keepdim": True})
    other = graph.call_method("add", (total, x), {"alpha": 2})
    graph.output([total, other])
    given = torch.arange(6.0).view(2, 3)
    found = DirectGraph(fx.GraphModule(torch.nn.Module(), graph))([given])
    expected = given.sum(dim=0, keepdim=True)
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], expected.add(given, alpha=2))
