"""`model.compile(backend="shoal")`, and what is asked before each call of a graph."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters
from torch._inductor import compile_fx
from torch.fx import GraphModule

from harness import ranks
from shoal.fsdp import fully_shard
from shoal.layout import Even, Flat
from zoo import Model, assert_same, batches, build, loss_of, trained

OPTIONS = {"cache": False}


def sharded(layout: Even | Flat) -> Model:
    model = build("mlp")
    for block in model.blocks:
        fully_shard(block, layout=layout)
    fully_shard(model, layout=layout)
    return model


@ranks(2, timeout_s=120)
def test_the_method_compiles_the_gathers_of_the_root_too() -> None:
    torch._dynamo.reset()
    model = sharded(Flat())
    model.compile(backend="shoal", fullgraph=True, options=OPTIONS)
    counters.clear()
    assert_same(trained(model, model), trained(sharded(Flat())))
    assert counters["stats"]["unique_graphs"] == 1
    assert all(unit.in_graph is not None for unit in model.__dict__["_shoal_state"].units)


@ranks(2, timeout_s=120)
def test_guards_look_at_parameters_and_not_into_them() -> None:
    for layout in (Even(), Flat()):
        torch._dynamo.reset()
        model = sharded(layout)
        model.compile(backend="shoal", fullgraph=True, options=OPTIONS)
        (tokens,) = batches(1)
        loss_of(model, tokens).backward()
        (entry,) = _debug_get_cache_entry_list(type(model)._run_in_graph.__code__)
        text = str(entry.guard_manager)
        assert "_parameters['weight']" in text
        assert "tensor_flatten" not in text
        assert "_parameters['weight'].local" not in text
        assert "_parameters['weight']._local_tensor" not in text


@ranks(2, timeout_s=120)
def test_a_frozen_parameter_gives_another_graph() -> None:
    torch._dynamo.reset()
    model = sharded(Flat())
    model.compile(backend="shoal", fullgraph=True, options=OPTIONS)
    (tokens,) = batches(1)
    loss_of(model, tokens).backward()
    model.zero_grad()
    name, frozen = next(iter(model.blocks[0].named_parameters()))
    frozen.requires_grad_(False)
    counters.clear()
    loss_of(model, tokens).backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert frozen.grad is None, name
    assert all(p.grad is not None for p in model.parameters() if p is not frozen)


@ranks(2, timeout_s=120)
def test_inductor_runs_collectives_where_they_were_put() -> None:
    """By itself it would run nodes in the order that takes the least memory."""
    reorders: dict[bool, set[bool]] = {True: set(), False: set()}

    def compile_graph(module: GraphModule, inputs: list[Any], **_: Any) -> Any:
        communicates = any("_c10d_functional" in str(node.target) for node in module.graph.nodes)
        reorders[communicates].add(compile_fx.config.reorder_for_peak_memory)

        def run(args: list[Any]) -> Any:
            return module(*args)

        return run

    (tokens,) = batches(1)
    torch._dynamo.reset()
    with patch.object(compile_fx, "compile_fx_inner", compile_graph):
        for model in (sharded(Flat()), build("mlp")):
            model.compile(backend="shoal", options={**OPTIONS, "inner": "inductor"})
            loss_of(model, tokens).backward()
    assert reorders == {True: {False}, False: {True}}
