"""Which kind of work a node does."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from compile_compare import compare, leaf
from shoal.compile.node_kinds import NodeKind, kind, mutated_inputs

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("source", "expected"),
    [(2, NodeKind.CHEAP), ("cpu", NodeKind.CHEAP), ("meta", NodeKind.EXPENSIVE)],
    ids=["of a number", "on one device", "between devices"],
)
def test_copies(source: int | str, expected: NodeKind) -> None:
    graph = fx.Graph()
    given: int | fx.Node = 2
    if isinstance(source, str):
        given = graph.placeholder("x")
        given.meta["val"] = torch.ones(3, device=source)
    node = graph.call_function(aten._to_copy.default, (given,), {"dtype": torch.float32})
    node.meta["val"] = torch.ones(3)
    assert kind(node) is expected


def test_numbers_under_vmap() -> None:
    compare(lambda x: torch.vmap(lambda row: (row * 2 + 0.5).sin())(x), leaf)


@pytest.mark.parametrize("name", ["_foreach_add_.List", "_foreach_zero_.default", "add_.Tensor"])
def test_writes_to_lists_are_writes(name: str) -> None:
    graph = fx.Graph()
    written, read = graph.placeholder("written"), graph.placeholder("read")
    packet, overload = name.split(".")
    op = getattr(getattr(aten, packet), overload)
    args = (written, read) if packet == "add_" else ([written], [read])
    node = graph.call_function(op, args[: len(op._schema.arguments) - (packet != "_foreach_zero_")])
    assert mutated_inputs(node) == [written]
    assert kind(node) is NodeKind.MUTATION
