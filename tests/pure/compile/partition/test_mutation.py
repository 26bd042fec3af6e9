"""Inputs that a graph writes to: written once, in their phase, and never read too late."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from joint_graphs import Split, Traced, kept_of, split_as_traced, split_by_min_cut, trace_joint

aten = torch.ops.aten


def by_budget(budget: float | None):
    def take_apart(traced: Traced) -> Split:
        if budget is None:
            return split_as_traced(traced.module, num_fwd_outputs=traced.num_fwd_outputs)
        return split_by_min_cut(
            traced.module, num_fwd_outputs=traced.num_fwd_outputs, memory_budget=budget
        )

    return take_apart


SPLITTERS = [by_budget(None), by_budget(1.0), by_budget(0.0)]


def write(traced: Traced, target: str, value: str, phase: str) -> None:
    """Let a joint graph end with a write into an input."""
    graph = traced.module.graph
    with graph.inserting_before(next(iter(reversed(graph.nodes)))):
        node = graph.call_function(aten.copy_.default, (traced.node(target), traced.node(value)))
    node.meta = {"val": traced.node(target).meta["val"], "phase": phase}


def run(traced: Traced, parts: Split) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Outputs and gradients, and the inputs after forward."""
    primals = [one.detach().clone() for one in traced.primals]
    with torch.no_grad():
        outputs, tensors, symbols = kept_of(traced, parts, parts.forward(*primals))
        between = [one.clone() for one in primals]
        gradients = parts.backward(*symbols, *tensors, *traced.tangents)
    return [*outputs, *gradients], between, primals


def assert_same(got, expected) -> None:
    for one, other in zip(got, expected, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def writes(module: fx.GraphModule) -> int:
    return sum(node.target == aten.copy_.default for node in module.graph.nodes)


@pytest.mark.parametrize("splitter", SPLITTERS)
@pytest.mark.parametrize("tagged", [False, True])
def test_backward_sees_the_old_value_of_what_forward_wrote_to(splitter, tagged):
    def function(weight, buffer):
        return weight * buffer.sin() * buffer, buffer + 1

    traced = trace_joint(function, [torch.randn(5, requires_grad=True), torch.randn(5)])
    expected = traced.run()
    write(traced, "primals_2", "add", "forward")
    if tagged:
        for node in traced.module.graph.nodes:
            if node.meta.get("phase") == "forward" and node.target != aten.copy_.default:
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    parts = splitter(traced)
    results, between, after = run(traced, parts)
    assert_same(results, expected)
    assert torch.equal(between[1], traced.primals[1] + 1)
    assert torch.equal(after[1], between[1])
    assert (writes(parts.forward), writes(parts.backward)) == (1, 0)


@pytest.mark.parametrize("splitter", SPLITTERS)
def test_backward_sees_the_old_value_through_a_view(splitter):
    def function(weight, buffer):
        return weight * buffer.view(5), buffer + 1

    traced = trace_joint(function, [torch.randn(5, requires_grad=True), torch.randn(5, 1)])
    expected = traced.run()
    write(traced, "primals_2", "add", "forward")
    results, _, _ = run(traced, splitter(traced))
    assert_same(results, expected)


@pytest.mark.parametrize("splitter", SPLITTERS)
def test_a_gradient_that_is_the_old_value_itself(splitter):
    traced = trace_joint(
        lambda weight, buffer: ((weight * buffer).sum(), buffer + 1),
        [torch.randn((), requires_grad=True), torch.randn(())],
    )
    graph = traced.module.graph
    output = next(iter(reversed(graph.nodes)))
    outputs = list(output.args[0])
    outputs[2] = traced.node("primals_2")  # as though the tangent were one
    output.args = (outputs,)
    write(traced, "primals_2", "add", "forward")
    results, _, _ = run(traced, splitter(traced))
    assert torch.equal(results[2], traced.primals[1])


@pytest.mark.parametrize("splitter", SPLITTERS)
def test_a_write_in_backward_stays_there(splitter):
    def function(weight, buffer):
        return weight.sin() * buffer.cos()

    traced = trace_joint(function, [torch.randn(5, requires_grad=True), torch.randn(5)])
    expected = traced.run()
    gradient = next(iter(reversed(traced.module.graph.nodes))).args[0][1]
    write(traced, "primals_2", gradient.name, "backward")
    parts = splitter(traced)
    results, between, after = run(traced, parts)
    assert_same(results, expected)
    assert torch.equal(between[1], traced.primals[1])
    assert torch.equal(after[1], expected[1])
    assert (writes(parts.forward), writes(parts.backward)) == (0, 1)


@pytest.mark.parametrize("splitter", SPLITTERS)
def test_a_write_in_both(splitter):
    def function(weight, buffer):
        return weight.sin() * buffer, buffer + 1

    traced = trace_joint(function, [torch.randn(5, requires_grad=True), torch.randn(5)])
    expected = traced.run()
    gradient = next(iter(reversed(traced.module.graph.nodes))).args[0][2]
    write(traced, "primals_2", "add", "forward")
    write(traced, "primals_2", gradient.name, "backward")
    results, between, after = run(traced, splitter(traced))
    assert_same(results, expected)
    assert torch.equal(between[1], expected[1])
    assert torch.equal(after[1], expected[2])


@pytest.mark.parametrize("splitter", SPLITTERS)
def test_running_statistics_are_not_kept(splitter):
    def function(x, weight, bias, mean, variance):
        mean, variance = mean * 1.0, variance * 1.0  # what functionalisation makes of the writes
        y = torch.nn.functional.batch_norm(x, mean, variance, weight, bias, training=True)
        return y, mean, variance

    inputs = [torch.randn(4, 3, 5, requires_grad=True), *torch.ones(2, 3).requires_grad_().unbind()]
    inputs[1:] = [one.detach().requires_grad_() for one in inputs[1:]]
    traced = trace_joint(function, [*inputs, torch.zeros(3), torch.ones(3)])
    backward = traced.calls(aten.native_batch_norm_backward.default)[0]
    # As captured functionally, backward is given the buffers themselves.
    backward.args = (
        *backward.args[:3],
        *(traced.node("primals_4"), traced.node("primals_5")),
        *backward.args[5:],
    )
    expected = traced.run()
    write(traced, "primals_4", "mul", "forward")
    write(traced, "primals_5", "mul_1", "forward")
    parts = splitter(traced)
    assert_same(run(traced, parts)[0], expected)
    names = {node.name for node in parts.backward.graph.find_nodes(op="placeholder")}
    assert not names & {"primals_4", "primals_5"}
    assert aten.clone.default not in {node.target for node in parts.forward.graph.nodes}


def test_effects_stay_where_they_are_and_run_once():
    traced = trace_joint(
        lambda x, token: (x.sin().exp(), token * 1),
        [torch.randn(5, requires_grad=True), torch.ones(())],
    )
    graph = traced.module.graph
    sine = traced.node("sin")
    with graph.inserting_before(sine):
        both = graph.call_function(
            torch.ops.higher_order.with_effects,
            (traced.node("primals_2"), aten.sin.default, traced.node("primals_1")),
        )
        item = graph.call_function(operator.getitem, (both, 1))
    both.meta = {
        "val": (traced.node("primals_2").meta["val"], sine.meta["val"]),
        "phase": "forward",
    }
    item.meta = dict(sine.meta)
    sine.replace_all_uses_with(item)
    graph.erase_node(sine)
    for splitter in SPLITTERS:
        parts = splitter(traced)
        targets = [node.target for node in parts.backward.graph.nodes]
        assert torch.ops.higher_order.with_effects not in targets
        assert [node.target for node in parts.forward.graph.nodes].count(
            torch.ops.higher_order.with_effects
        ) == 1
