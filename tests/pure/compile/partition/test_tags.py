"""Checkpoint tags decide what is computed again, with the same random numbers."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from joint_graphs import Split, Traced, run_split, split_as_traced, split_by_min_cut, trace_joint

aten = torch.ops.aten
SPLITTERS = [split_as_traced, split_by_min_cut]


def square(side: int = 6) -> torch.Tensor:
    return torch.randn(side, side, requires_grad=True)


def tag(traced: Traced, policy: CheckpointPolicy, *ops: object, region: int = 1) -> None:
    for node in traced.module.graph.nodes:
        if node.meta.get("phase") == "forward" and (not ops or node.target in ops):
            node.meta["recompute"] = policy
            node.meta["ac_graph_id"] = region


def computed_again(parts: Split) -> list[str]:
    return [
        node.name
        for node in parts.backward.graph.nodes
        if node.op == "call_function" and node.meta["phase"] == "forward"
    ]


def kept_names(parts: Split) -> list[str]:
    return [
        node.name
        for node in parts.backward.graph.nodes
        if node.op == "placeholder" and not node.name.startswith("tangents")
    ]


def assert_equal_to_whole(traced: Traced, parts: Split) -> None:
    for seed in (0, 1):
        for got, expected in zip(run_split(traced, parts, seed), traced.run(seed), strict=True):
            assert torch.equal(got, expected)


def products(x, w):
    return torch.mm(torch.mm(x, w).sin(), w).sin()


@pytest.mark.parametrize("splitter", SPLITTERS)
@pytest.mark.parametrize(
    "policy", [CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE]
)
def test_all_that_is_tagged_is_computed_again(splitter, policy):
    traced = trace_joint(products, [square(), square()])
    tag(traced, policy)
    parts = splitter(traced.module, num_fwd_outputs=1)
    assert kept_names(parts) == ["primals_1", "primals_2"]
    assert {"mm", "sin", "mm_1"} <= set(computed_again(parts))
    assert_equal_to_whole(traced, parts)


@pytest.mark.parametrize("budget", [1.0, 0.5, 0.0])
def test_what_must_be_kept_is_kept_even_where_memory_is_short(budget):
    traced = trace_joint(products, [square(), square()])
    tag(traced, CheckpointPolicy.MUST_SAVE, aten.mm.default)
    parts = split_by_min_cut(traced.module, num_fwd_outputs=1, memory_budget=budget)
    assert "mm" in kept_names(parts)
    assert "mm" not in computed_again(parts)
    assert_equal_to_whole(traced, parts)


def test_what_had_better_be_kept_is_kept_while_memory_lasts():
    traced = trace_joint(lambda x, w: (x.sin().cos() * w).sum(), [square(), square()])
    free = split_by_min_cut(traced.module, num_fwd_outputs=1)
    tag(traced, CheckpointPolicy.PREFER_SAVE, aten.cos.default)
    assert "cos" not in kept_names(free)
    assert "cos" in kept_names(split_by_min_cut(traced.module, num_fwd_outputs=1))
    short = split_by_min_cut(traced.module, num_fwd_outputs=1, memory_budget=0)
    assert kept_names(short) == ["primals_1", "primals_2"]


@pytest.mark.parametrize("splitter", SPLITTERS)
def test_the_border_between_two_regions_is_kept(splitter):
    traced = trace_joint(products, [square(), square()])
    tag(traced, CheckpointPolicy.MUST_RECOMPUTE)
    second = list(traced.calls(aten.mm.default))[1]
    for node in (second, *second.users):
        if node.meta.get("phase") == "forward":
            node.meta["ac_graph_id"] = 2
    parts = splitter(traced.module, num_fwd_outputs=1)
    assert "sin" in kept_names(parts)
    assert "sin" not in computed_again(parts)
    assert_equal_to_whole(traced, parts)


@pytest.mark.parametrize("splitter", SPLITTERS)
def test_recomputation_waits_until_it_is_needed(splitter):
    traced = trace_joint(products, [square(), square()])
    tag(traced, CheckpointPolicy.MUST_RECOMPUTE)
    names = [node.name for node in splitter(traced.module, num_fwd_outputs=1).backward.graph.nodes]
    first_gradient = next(i for i, name in enumerate(names) if name.startswith(("cos", "mul")))
    assert names.index("mm_1") < first_gradient  # needed at once
    traced.module.graph.lint()


def dropped(x, w):
    drawn = torch.nn.functional.dropout(torch.mm(x, w), 0.5)
    return torch.nn.functional.dropout(drawn.sin(), 0.3) * torch.rand_like(x)


@pytest.mark.parametrize("splitter", SPLITTERS)
def test_random_numbers_are_kept_where_nothing_is_tagged(splitter):
    traced = trace_joint(dropped, [square(), square()])
    parts = splitter(traced.module, num_fwd_outputs=1)
    assert not [name for name in computed_again(parts) if name.startswith(("native", "rand"))]
    assert_equal_to_whole(traced, parts)
    short = split_by_min_cut(traced.module, num_fwd_outputs=1, memory_budget=0)
    assert not [name for name in computed_again(short) if name.startswith(("native", "rand"))]


@pytest.mark.parametrize("splitter", SPLITTERS)
def test_random_numbers_computed_again_are_the_same(splitter):
    traced = trace_joint(dropped, [square(), square()])
    tag(traced, CheckpointPolicy.MUST_RECOMPUTE)
    parts = splitter(traced.module, num_fwd_outputs=1)
    assert_equal_to_whole(traced, parts)
    kept = kept_names(parts)
    num_states = sum(name.startswith("rng_state") for name in kept)
    assert num_states == 3
    assert kept[-num_states:] == [f"rng_state_output_{i}" for i in range(num_states)]
    assert parts.num_saved_tensors == len(kept)
    for module in (parts.forward, parts.backward):
        assert all("val" in node.meta for node in module.graph.nodes)
        assert aten.native_dropout.default not in {node.target for node in module.graph.nodes}


def test_backward_leaves_the_generator_where_it_was():
    traced = trace_joint(dropped, [square(), square()])
    tag(traced, CheckpointPolicy.MUST_RECOMPUTE)
    parts = split_by_min_cut(traced.module, num_fwd_outputs=1)
    torch.manual_seed(3)
    with torch.no_grad():
        results = parts.forward(*traced.primals)
        state = torch.get_rng_state()
        parts.backward(*results[1:], *traced.tangents)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("splitter", SPLITTERS)
def test_random_numbers_nobody_reads_are_still_drawn(splitter):
    def function(x):
        torch.rand_like(x)
        return x * torch.rand_like(x)

    traced = trace_joint(function, [square()])
    assert_equal_to_whole(traced, splitter(traced.module, num_fwd_outputs=1))


def test_attention_without_dropout_is_not_random():
    def function(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).sum()

    inputs = [torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3)]
    traced = trace_joint(function, inputs)
    short = split_by_min_cut(traced.module, num_fwd_outputs=1, memory_budget=0)
    assert kept_names(short) == ["primals_1", "primals_2", "primals_3"]
    assert_equal_to_whole(traced, short)


def test_every_joint_node_must_say_where_it_ran():
    traced = trace_joint(products, [square(), square()])
    del traced.node("mm").meta["phase"]
    with pytest.raises(RuntimeError, match=r"meta\[\"phase\"\] of mm"):
        split_by_min_cut(traced.module, num_fwd_outputs=1)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(shard, 2, "0")
        return torch.ops._c10d_functional.wait_tensor(gathered)

    @staticmethod
    def backward(ctx, gradient):
        reduced = torch.ops._c10d_functional.reduce_scatter_tensor(gradient, "sum", 2, "0")
        return torch.ops._c10d_functional.wait_tensor(reduced)


def gathered_product(x, shard):
    return torch.mm(x, Gather.apply(shard)).sin()


@pytest.fixture
def gather() -> Traced:
    def example(x, shard):  # shapes alone: there is no group to ask
        return torch.mm(x, torch.cat([shard, shard])).sin()

    return trace_joint(
        gathered_product,
        [torch.randn(4, 6, requires_grad=True), torch.randn(3, 5, requires_grad=True)],
        example=example,
    )


def collectives(module: fx.GraphModule) -> list[str]:
    return [
        node.target.name().split("::")[1]
        for node in module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == "_c10d_functional"
    ]


@pytest.mark.parametrize("budget", [None, 1.0, 0.0])
def test_collectives_run_once(gather, budget):
    parts = (
        split_as_traced(gather.module, num_fwd_outputs=1)
        if budget is None
        else split_by_min_cut(gather.module, num_fwd_outputs=1, memory_budget=budget)
    )
    assert collectives(parts.forward) == ["all_gather_into_tensor", "wait_tensor"]
    assert collectives(parts.backward) == ["reduce_scatter_tensor", "wait_tensor"]
    assert "wait_tensor" in kept_names(parts)


@pytest.mark.parametrize("splitter", SPLITTERS)
@pytest.mark.parametrize("tagged", ["all_gather_into_tensor", "wait_tensor"])
def test_a_tagged_gather_is_done_again_with_its_wait(gather, splitter, tagged):
    gather.node(tagged).meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    parts = splitter(gather.module, num_fwd_outputs=1)
    assert collectives(parts.forward) == ["all_gather_into_tensor", "wait_tensor"]
    assert sorted(collectives(parts.backward)) == [
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "wait_tensor",
        "wait_tensor",
    ]
    assert "primals_2" in kept_names(parts)
    assert "wait_tensor" not in kept_names(parts)
