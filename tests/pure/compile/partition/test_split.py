"""The calling convention of the two graphs, symbolic shapes, and what moves between them."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
from torch import fx

from joint_graphs import (
    Split,
    Traced,
    held_bytes,
    kept_of,
    run_split,
    split_as_traced,
    split_by_min_cut,
    trace_joint,
)
from shoal.compile.partition.joint import read_joint
from shoal.compile.partition.partitioners import (
    default_partition,
    min_cut_rematerialization_partition,
)
from shoal.compile.partition.split import split

aten = torch.ops.aten
SPLITTERS = [split_as_traced, split_by_min_cut]
DOORS = [
    default_partition,
    min_cut_rematerialization_partition,
    functools.partial(min_cut_rematerialization_partition, memory_budget=0.5),
]


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def names(module: fx.GraphModule, op: str = "placeholder") -> list[str]:
    return [node.name for node in module.graph.nodes if node.op == op]


def outputs(module: fx.GraphModule) -> list[fx.Node]:
    return list(next(iter(reversed(module.graph.nodes))).args[0])


def counts(module: fx.GraphModule) -> tuple[int, int]:
    return len(names(module)), len(outputs(module))


@pytest.mark.parametrize("door", DOORS)
def test_the_doors_are_called_as_functorch_calls_them(door):
    traced = trace_joint(lambda a, b: (a.sin() @ b).tanh(), [leaf(3, 3), leaf(3, 3)])
    forward, backward = door(
        traced.module, None, num_fwd_outputs=1, static_lifetime_input_indices=[1]
    )
    assert names(forward) == ["primals_1", "primals_2"]
    assert names(backward)[-1] == "tangents_1"
    with torch.no_grad():
        result, *kept = forward(*traced.primals)
        gradients = backward(*kept, *traced.tangents)
    assert all(map(torch.equal, (result, *gradients), traced.run()))


def test_results_of_one_operator_are_kept_one_by_one():
    def function(x, weight, bias):
        return torch.nn.functional.layer_norm(x, [10], weight, bias)

    traced = trace_joint(function, [leaf(3, 10), leaf(10), leaf(10)])
    forward, backward = default_partition(traced.module, None, num_fwd_outputs=1)
    assert (counts(forward), counts(backward)) == ((3, 6), (6, 3))


def test_cheap_chains_are_computed_again():
    traced = trace_joint(lambda x: x.cos().cos().cos(), [leaf(3)])
    forward, backward = min_cut_rematerialization_partition(traced.module, None, num_fwd_outputs=1)
    assert (counts(forward), counts(backward)) == ((1, 2), (2, 1))
    traced = trace_joint(
        lambda a, b, c, d: (a + b + c + d).cos().cos(), [leaf(3) for _ in range(4)]
    )
    forward, backward = min_cut_rematerialization_partition(traced.module, None, num_fwd_outputs=1)
    assert (counts(forward), counts(backward)) == ((4, 2), (2, 4))


def test_parts_of_what_is_computed_again_are_taken_at_once():
    """A tuple that waits for its last reader holds all of its parts."""

    def function(x):
        first, second = x.sin().split(2)
        return first.sin() + second.cos()

    traced = trace_joint(function, [leaf(4, 4)])
    _, backward = min_cut_rematerialization_partition(traced.module, None, num_fwd_outputs=1)
    called = [node.target for node in backward.graph.nodes if node.op == "call_function"]
    at = called.index(aten.split.Tensor)
    assert called[at + 1 : at + 3] == [operator.getitem] * 2
    assert called.count(operator.getitem) == 2


@pytest.mark.parametrize("splitter", SPLITTERS)
def test_sizes_are_kept_instead_of_tensors(splitter):
    traced = trace_joint(lambda x: x.sum(dim=1), [leaf(10, 7)], mode="symbolic")
    parts = splitter(traced.module, num_fwd_outputs=1)
    assert parts.num_saved_tensors == 0
    assert parts.num_saved_symints in (1, 2)
    assert all(map(torch.equal, run_split(traced, parts), traced.run()))


@pytest.mark.parametrize(
    "splitter", [*SPLITTERS, functools.partial(split_by_min_cut, memory_budget=0.4)]
)
def test_symbolic_graphs_run_on_other_sizes_and_get_no_guards(splitter):
    def function(x, w):
        y = torch.nn.functional.layer_norm(x @ w, [w.shape[1]])
        return torch.nn.functional.gelu(y).reshape(-1, 4).sum(0)

    traced = trace_joint(function, [leaf(6, 5), leaf(5, 8)], mode="symbolic")
    shapes = traced.node("primals_1").meta["val"].fake_mode.shape_env
    guards = len(shapes.guards)
    parts = splitter(traced.module, num_fwd_outputs=1)
    assert len(shapes.guards) == guards
    other = Traced(
        module=traced.module,
        num_fwd_outputs=1,
        primals=(leaf(9, 5), leaf(5, 8)),
        tangents=traced.tangents,
    )
    for one in (traced, other):
        assert all(map(torch.equal, run_split(one, parts), one.run()))


def test_symbols_follow_tensors_in_forward_and_precede_them_in_backward():
    traced = trace_joint(lambda x, w: x.sum(dim=1) * w, [leaf(6, 5), leaf(6)], mode="symbolic")
    parts = split_by_min_cut(traced.module, num_fwd_outputs=1)
    kept = outputs(parts.forward)[1:]
    tensors, symbols = kept[: parts.num_saved_tensors], kept[parts.num_saved_tensors :]
    assert len(symbols) == parts.num_saved_symints > 0
    assert names(parts.backward) == [one.name for one in (*symbols, *tensors)] + ["tangents_1"]


def test_the_symbols_of_all_that_backward_takes_are_kept_first():
    # An integer of the size of a dimension gets the dimension's symbol: the graph takes it in.
    traced = trace_joint(lambda n, x: x.sin(), [7, leaf(7, 3)], mode="symbolic")
    size, tensor = (traced.node(name).meta["val"] for name in ("primals_1", "primals_2"))
    assert str(size) == str(tensor.shape[0])
    parts = split_by_min_cut(traced.module, num_fwd_outputs=1)
    assert names(parts.backward) == ["primals_1", "primals_2", "tangents_1"]
    assert (parts.num_saved_symints, parts.num_saved_tensors) == (1, 1)
    assert torch.equal(run_split(traced, parts)[2], traced.run()[2])


def test_a_mask_of_bytes_is_kept_instead_of_what_it_was_made_from():
    table = torch._decomp.get_decompositions([aten.threshold_backward])
    traced = trace_joint(
        lambda x, w: torch.relu(x @ w), [leaf(16, 16), leaf(16, 16)], decompositions=table
    )
    parts = split_by_min_cut(traced.module, num_fwd_outputs=1)
    with torch.no_grad():
        kept = kept_of(traced, parts, parts.forward(*traced.primals))[1]
    assert held_bytes(kept) == 2 * 16 * 16 * 4 + 16 * 16
    assert all(map(torch.equal, run_split(traced, parts), traced.run()))
    strict = split_as_traced(traced.module, num_fwd_outputs=1)
    assert "le" in names(strict.backward, "call_function")  # where it was traced


@pytest.mark.parametrize("splitter", SPLITTERS)
def test_gradients_there_are_none_of(splitter):
    traced = trace_joint(lambda a, b, c: a * c, [leaf(3), leaf(3), torch.randn(3)])
    parts = splitter(traced.module, num_fwd_outputs=1)
    got, expected = run_split(traced, parts), traced.run()
    assert [one is None for one in got] == [False, False, True, True]
    assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("splitter", SPLITTERS)
def test_a_gradient_that_needs_no_tangent(splitter):
    traced = trace_joint(lambda a, b: (a + b, a.detach() * 2), [leaf(3), leaf(3)])
    parts = splitter(traced.module, num_fwd_outputs=2)
    assert parts.num_saved_tensors == 0
    assert all(map(torch.equal, run_split(traced, parts), traced.run()))


def test_two_equal_outputs_stay_two_tensors():
    traced = trace_joint(lambda x: (x.sin(), x.sin()), [leaf(3)])
    parts = split_by_min_cut(traced.module, num_fwd_outputs=2)
    with torch.no_grad():
        first, second = parts.forward(*traced.primals)[:2]
    assert first.data_ptr() != second.data_ptr()


def test_equal_work_is_done_once():
    def function(x, w):
        return x.to(torch.float64) @ w + x.to(torch.float64) @ (w * 2)

    traced = trace_joint(function, [leaf(4, 4), leaf(4, 4).double().detach().requires_grad_()])
    parts = split_by_min_cut(traced.module, num_fwd_outputs=1)
    casts = [node for node in parts.forward.graph.nodes if node.target == aten._to_copy.default]
    assert len(casts) == 1
    assert all(map(torch.equal, run_split(traced, parts), traced.run()))


def test_constants_of_the_module_go_where_they_are_read():
    table = torch.arange(4.0)
    traced = trace_joint(lambda x: (x * table).sin() * table, [leaf(4)], mode="real")
    if not names(traced.module, "get_attr"):
        pytest.skip("this torch traces the constant as something else")
    for splitter in SPLITTERS:
        parts = splitter(traced.module, num_fwd_outputs=1)
        assert all(map(torch.equal, run_split(traced, parts), traced.run()))


def test_stack_traces_and_names_survive():
    traced = trace_joint(lambda x: x.sin().cos(), [leaf(4)])
    for node in traced.module.graph.nodes:
        node.meta["stack_trace"] = f"line of {node.name}"
    parts: Split = split_by_min_cut(traced.module, num_fwd_outputs=1)
    for module in (parts.forward, parts.backward):
        for node in module.graph.nodes:
            if node.op == "call_function":
                assert node.meta["stack_trace"] == f"line of {node.name}"


def test_what_backward_needs_and_is_not_kept_is_named():
    traced = trace_joint(lambda x, w: x @ w, [leaf(3, 3), leaf(3, 3)])
    joint = read_joint(traced.module, 1)
    with pytest.raises(RuntimeError, match="backward needs primals_2"):
        split(joint, [traced.node("primals_1")])


@pytest.mark.parametrize("wrong", [-1, 9])
def test_there_are_only_so_many_outputs(wrong):
    traced = trace_joint(lambda x: x.sin(), [leaf(3)])
    with pytest.raises(ValueError, match="2 outputs"):
        split_as_traced(traced.module, num_fwd_outputs=wrong)


def test_an_output_of_backward_is_none_of_forward():
    traced = trace_joint(lambda x: x.sin(), [leaf(3)])
    with pytest.raises(RuntimeError, match="depends on backward"):
        split_as_traced(traced.module, num_fwd_outputs=2)
