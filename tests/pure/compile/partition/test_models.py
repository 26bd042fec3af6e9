"""Models taken apart give what the joint graph gives, and keep no more than torch's cut does."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._decomp import core_aten_decompositions
from torch._functorch.partitioners import min_cut_rematerialization_partition as torch_min_cut

from joint_graphs import (
    Split,
    Traced,
    copied,
    held_bytes,
    kept_of,
    run_split,
    split_as_traced,
    split_by_min_cut,
    trace_joint,
)
from joint_models import MODELS, as_function

BUDGETS = [None, 1.0, 0.7, 0.3, 0.0]
"""None: each node where it was traced."""


@pytest.fixture(scope="module", params=["whole", "decomposed"])
def graphs(request) -> dict[str, Traced]:
    table = core_aten_decompositions() if request.param == "decomposed" else None
    return {name: trace_joint(*as_function(name), decompositions=table) for name in MODELS}


def take_apart(traced: Traced, budget: float | None) -> Split:
    if budget is None:
        return split_as_traced(traced.module, num_fwd_outputs=traced.num_fwd_outputs)
    return split_by_min_cut(
        traced.module, num_fwd_outputs=traced.num_fwd_outputs, memory_budget=budget
    )


def kept_bytes(traced: Traced, parts: Split) -> int:
    with torch.no_grad():
        return held_bytes(kept_of(traced, parts, parts.forward(*traced.primals))[1])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_parts_give_what_the_whole_gives(graphs, name, budget):
    traced = graphs[name]
    for got, expected in zip(
        run_split(traced, take_apart(traced, budget)), traced.run(), strict=True
    ):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", MODELS)
def test_no_more_is_kept_than_by_torch(graphs, name):
    traced = graphs[name]
    forward, _ = torch_min_cut(copied(traced.module), None, num_fwd_outputs=traced.num_fwd_outputs)
    with torch.no_grad():
        theirs = held_bytes(forward(*traced.primals)[traced.num_fwd_outputs :])
    assert kept_bytes(traced, take_apart(traced, 1.0)) <= 1.05 * theirs


@pytest.mark.parametrize("name", MODELS)
def test_a_smaller_budget_keeps_less(graphs, name):
    traced = graphs[name]
    kept = [kept_bytes(traced, take_apart(traced, budget)) for budget in (1.0, 0.7, 0.3, 0.0)]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[-1]
    for budget, found in zip((0.7, 0.3), kept[1:], strict=False):
        assert found <= kept[-1] + budget * (kept[0] - kept[-1])


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_graphs_are_the_same_every_time(graphs, budget):
    traced = graphs["two blocks"]
    before = str(traced.module.graph)
    codes = {
        (parts.forward.code, parts.backward.code)
        for parts in (take_apart(traced, budget) for _ in range(2))
    }
    assert len(codes) == 1
    assert str(traced.module.graph) == before


@pytest.mark.parametrize("budget", BUDGETS)
def test_nothing_dead_is_left_and_values_are_known(graphs, budget):
    parts = take_apart(graphs["block"], budget)
    for module in (parts.forward, parts.backward):
        for node in module.graph.nodes:
            assert node.op in ("placeholder", "output") or node.users, node
            assert "val" in node.meta, node
    for node in parts.backward.graph.nodes:
        if node.op == "call_function":
            assert node.meta["phase"] in ("forward", "backward")
    assert isinstance(parts.forward, fx.GraphModule)


def test_parameters_that_live_on_are_free(graphs):
    traced = graphs["mlp"]
    static = range(1, len(traced.primals))
    parts = split_by_min_cut(traced.module, num_fwd_outputs=1, static_inputs=static)
    again = run_split(traced, parts)
    assert all(map(torch.equal, again, traced.run()))
