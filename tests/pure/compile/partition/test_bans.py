"""What is not computed again, and why; what a value weighs."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from joint_graphs import Traced, run_split, split_as_traced, split_by_min_cut, trace_joint
from shoal.compile.node_kinds import NodeKind, kind
from shoal.compile.partition import saved_values
from shoal.compile.partition.bans import Strength, find_bans
from shoal.compile.partition.cost import kept_bytes, work
from shoal.compile.partition.fusion import LONGEST_CHAIN
from shoal.compile.partition.joint import read_joint
from shoal.compile.partition.saved_values import is_keepable

aten = torch.ops.aten


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def bans_of(traced: Traced):
    return {node.name: ban for node, ban in find_bans(read_joint(traced.module, 1)).items()}


def test_a_residual_connection_is_not_computed_again():
    def function(x, w):
        start = x.sin()
        return (start + (start.cos() @ w).exp()).tanh()

    bans = bans_of(trace_joint(function, [leaf(4, 4), leaf(4, 4)]))
    assert "add" in bans
    assert bans["add"] is Strength.FUSION
    assert bans["mm"] is Strength.WORK


def test_a_long_chain_is_broken():
    def function(x):
        for _ in range(LONGEST_CHAIN + 20):
            x = x.sin()
        return x

    bans = bans_of(trace_joint(function, [leaf(4)]))
    assert [name for name in bans if name.startswith("sin")] == [f"sin_{LONGEST_CHAIN}"]


def test_a_small_result_of_a_reduction_is_kept():
    traced = trace_joint(lambda x: x / x.exp().sum(-1, keepdim=True), [leaf(4, 64)])
    bans = bans_of(traced)
    assert bans["sum_1"] is Strength.WORK
    assert "exp" not in bans


@pytest.mark.parametrize("splitter", [split_as_traced, split_by_min_cut])
@pytest.mark.parametrize("tagged", ["operator", "results"])
def test_results_follow_their_operator(splitter, tagged):
    traced = trace_joint(lambda x: torch.nn.functional.layer_norm(x.sin(), [8]), [leaf(4, 8)])
    operator = traced.calls(aten.native_layer_norm.default)[0]
    for node in [operator] if tagged == "operator" else list(operator.users):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    parts = splitter(traced.module, num_fwd_outputs=1)
    taken = [node.name for node in parts.backward.graph.find_nodes(op="placeholder")]
    results = [name for name in taken if name.startswith("getitem")]
    assert results == ([] if tagged == "operator" else ["getitem_1", "getitem_2"])
    assert all(map(torch.equal, run_split(traced, parts), traced.run()))


class Again(torch.autograd.Function):
    """Does its work in backward, as a checkpoint would."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (x @ w).sum()

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient * (x @ w).sum() * x, None


def test_work_that_was_traced_in_backward_stays_there():
    traced = trace_joint(Again.apply, [leaf(4, 4), torch.randn(4, 4)])
    parts = split_by_min_cut(traced.module, num_fwd_outputs=1)
    products = [
        sum(node.target == aten.mm.default for node in module.graph.nodes)
        for module in (parts.forward, parts.backward)
    ]
    assert products == [1, 1]


def call(op, *args: fx.Node, val: torch.Tensor) -> fx.Node:
    node = args[0].graph.call_function(op, args)
    node.meta["val"] = val
    return node


@pytest.fixture
def given() -> fx.Node:
    node = fx.Graph().placeholder("primals_1")
    node.meta["val"] = torch.empty(4, 4)
    return node


def test_a_copy_to_another_device_is_not_cheap(given):
    same = call(aten._to_copy.default, given, val=torch.empty(4, 4))
    other = call(aten._to_copy.default, given, val=torch.empty(4, 4, device="meta"))
    assert (kind(same), kind(other)) == (NodeKind.CHEAP, NodeKind.EXPENSIVE)


def test_a_view_weighs_what_it_keeps_alive(given):
    whole = given.meta["val"]
    part = call(aten.slice.Tensor, given, val=whole[:1])
    wide = call(aten.expand.default, given, val=torch.empty(4, 1).expand(4, 100))
    assert [kept_bytes(node) for node in (given, part, wide)] == [64, 64, 16]


def test_work_is_counted_in_operations(given):
    product = call(aten.mm.default, given, given, val=torch.empty(4, 4))
    sine = call(aten.sin.default, given, val=torch.empty(4, 4))
    assert (work(product), work(sine)) == (2 * 4 * 4 * 4, 16)


def test_a_pending_collective_cannot_be_kept():
    def function(x):
        pending = torch.ops._c10d_functional.all_reduce(x.detach(), "sum", "0")
        return x * torch.ops._c10d_functional.wait_tensor(pending)

    traced = trace_joint(function, [leaf(4)], example=lambda x: x * 1)
    joint = read_joint(traced.module, 1)
    found = {node.name: is_keepable(joint, node, {}) for node in joint.nodes}
    assert (found["all_reduce"], found["wait_tensor"]) == (False, True)


def test_a_budget_holds_where_sizes_were_guessed_too_low(monkeypatch):
    def function(x, *weights):
        for weight in weights:
            x = torch.mm(x, weight).cos()
        return x.sum()

    traced = trace_joint(function, [leaf(8, 8) for _ in range(9)])
    pack = saved_values.most_worth
    monkeypatch.setattr(
        saved_values, "most_worth", lambda sizes, *rest: pack([size // 2 for size in sizes], *rest)
    )
    parts = split_by_min_cut(traced.module, num_fwd_outputs=1, memory_budget=0.25)
    kept = [node.name for node in parts.backward.graph.find_nodes(op="placeholder")]
    between = [name for name in kept if not name.startswith(("primals", "tangents"))]
    assert 0 < len(between) <= 4  # of 8 products and 7 cosines
