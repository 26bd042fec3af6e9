"""Metadata computed again, and new nodes that carry it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from comm_graphs import all_reduce, capture, comm, integers, name, wait
from shoal.compile.passes.metadata import check_graph, inconsistencies
from shoal.compile.passes.rewrite import call_function, flatten, sizes, unflatten
from shoal.errors import InvariantError, UsageError

aten = torch.ops.aten


@pytest.mark.parametrize("mode", ["fake", "real", "symbolic"])
def test_traced_graphs_are_consistent(mode):
    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        x.add_(1)
        parts = (x.t() @ y).split(2)
        return [*parts, wait(all_reduce(x)), torch.rand_like(y), y.nonzero(), y.new_empty(3, 1).t()]

    graph = capture(fn, integers(3, 4), integers(3, 2), mode=mode).graph
    assert inconsistencies(graph) == {}


def test_wrong_metadata_is_found():
    graph = capture(lambda x: torch.relu(x).t() + 1, integers(3, 4)).graph
    *_, relu, view, add, _output = graph.nodes
    check_graph(graph)
    held = view.meta["val"]
    for wrong in (held.t(), held.double(), held.contiguous()):
        view.meta["val"] = wrong
        with pytest.raises(InvariantError, match=rf"first: {view.name} \(aten.t.default\) says"):
            check_graph(graph)
        assert view in inconsistencies(graph)
        assert relu not in inconsistencies(graph)
        check_graph(graph, inconsistencies(graph))
    assert add in graph.nodes


def test_wrong_order_is_found():
    graph = capture(lambda x: torch.relu(x) + 1, integers(3)).graph
    _, relu, add, _output = graph.nodes
    add.append(relu)
    with pytest.raises(RuntimeError, match="used before it has been defined"):
        check_graph(graph)


def test_new_nodes_say_what_they_give():
    graph = capture(lambda x: torch.relu(x), integers(3, 4)).graph
    relu = list(graph.nodes)[1]
    with graph.inserting_after(relu):
        node = call_function(graph, aten.sum.dim_IntList, (relu, [0]), {"dtype": torch.float64})
    assert node.meta["val"].shape == (4,)
    assert node.meta["tensor_meta"].dtype is torch.float64
    check_graph(graph)


def test_results_of_collectives_are_contiguous():
    """As they come: torch says of lists that they keep the strides of what is sent."""
    graph = capture(lambda x: x.t() + 1, integers(3, 4)).graph
    add = list(graph.nodes)[-2]
    with graph.inserting_after(add):
        node = call_function(graph, comm.all_reduce_coalesced.default, ([add], "sum", name()))
    assert add.meta["val"].stride() == (1, 4)
    assert [one.stride() for one in node.meta["val"]] == [(3, 1)]
    (real,) = comm.all_reduce_coalesced([integers(3, 4).t()], "sum", name())
    assert wait(real).stride() == (3, 1)


def test_targets_and_missing_metadata_are_refused():
    graph = fx.Graph()
    x = graph.placeholder("x")
    with pytest.raises(TypeError, match="got 'relu'"):
        call_function(graph, "relu", (x,))  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="what x gives in its metadata"):
        call_function(graph, aten.relu.default, (x,))


@pytest.mark.parametrize("dims", [(0, 1, 2), (2, 0, 1), (1, 0, 2), (2, 1, 0)], ids=str)
def test_rows_follow_memory(dims):
    """A dense tensor goes in a row and back without a copy, and keeps its strides."""
    x = integers(2, 3, 4).permute(dims)
    graph = capture(lambda x: x + 0, x).graph
    given = next(iter(graph.nodes))
    output = list(graph.nodes)[-1]
    with graph.inserting_before(output):
        row = flatten(graph, given, given)
        back = unflatten(graph, row, sizes(graph, given), given)
    output.args = ([row, back],)
    check_graph(graph)
    flat, same = fx.GraphModule({}, graph)(x)
    assert flat.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert torch.equal(flat, x.as_strided((24,), (1,)))
    assert torch.equal(same, x)
    assert same.stride() == x.stride()
