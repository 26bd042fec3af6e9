"""Graphs survive a file, and a file can bring nothing but operators of torch's."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from shoal.compile.cache.errors import DamagedError, NotExactError
from shoal.compile.cache.graphs import graph_from_json, graph_to_json


def program(x: torch.Tensor, y: torch.Tensor) -> list[Any]:
    first, second = torch.split(x, 2)
    z = torch.full_like(first, float("-inf"), dtype=torch.float64)
    x.mul_(3)
    return [first.to(z.dtype) + z, None, y.sum((0, 1), keepdim=True) / 3, second[..., ::2]]


def traced() -> torch.fx.GraphModule:
    return make_fx(program)(torch.ones(4, 6), torch.ones(2, 3))


def test_a_graph_comes_back() -> None:
    module = traced()
    described = json.loads(json.dumps(graph_to_json(module), allow_nan=False))
    again = graph_from_json(described)
    assert [(n.op, n.name, n.target, n.kwargs) for n in again.graph.nodes][:-1] == [
        (n.op, n.name, n.name if n.op == "placeholder" else n.target, n.kwargs)
        for n in module.graph.nodes
    ][:-1]
    want = module(torch.ones(4, 6), torch.ones(2, 3))
    got = again(torch.ones(4, 6), torch.ones(2, 3))
    assert got[1] is None
    assert all(torch.equal(got[i], want[i]) for i in (0, 2, 3))


def changed(number: int, **parts: Any) -> Any:
    described = copy.deepcopy(graph_to_json(traced()))
    described[number].update(parts)
    return described


FIRST_CALL = 2


@pytest.mark.parametrize(
    "described",
    [
        [],
        {},
        [{"input": "x"}],
        changed(0, input="x; print('owned')"),
        changed(0, input="lambda"),
        changed(0, input="SHOAL_op_0"),
        changed(0, input=3),
        changed(1, input="x_1"),
        changed(FIRST_CALL, name="a = print('owned')"),
        changed(FIRST_CALL, op="load_library"),
        changed(FIRST_CALL, op="aten.nothing.default"),
        changed(FIRST_CALL, function="getitem"),
        changed(FIRST_CALL, args=[{"node": "later"}]),
        changed(FIRST_CALL, args={"dict": []}),
        changed(FIRST_CALL, kwargs={"dict": [["x=print('owned')", 1]]}),
        changed(FIRST_CALL, kwargs=[]),
        [*graph_to_json(traced()), {"output": []}],
    ],
)
def test_nothing_else_comes_out_of_a_file(described: Any) -> None:
    with pytest.raises(DamagedError):
        graph_from_json(described)


def test_constants_and_unknown_sizes_are_refused() -> None:
    constant = torch.ones(2)
    with pytest.raises(NotExactError, match="get_attr"):
        graph_to_json(make_fx(lambda x: x + constant)(torch.ones(2)))
    with pytest.raises(NotExactError, match="not known"):
        graph_to_json(make_fx(lambda x: x + 1, tracing_mode="symbolic")(torch.ones(3)))
