"""Pipelines: checked before they run, counted, and edited."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx

from comm_graphs import all_reduce, capture, check_same, gather, integers, scatter, stages, wait
from shoal.compile.passes.pipeline import Target
from shoal.errors import InvariantError, UsageError
from shoal.passes import Fact, Pass, Pipeline, count_traffic, replicated, sharded


def nothing(graph: fx.Graph) -> None:
    """A pass that changes nothing."""


def step(x: Tensor, *shards: Tensor) -> list[Tensor]:
    """Weights gathered, gradients scattered."""
    weights = [wait(gather(shard)) for shard in shards]
    for weight in weights:
        x = torch.relu(x @ weight)
    return [x, *(wait(scatter(x @ weight)) + 1 for weight in weights)]


def step_args() -> tuple[Tensor, ...]:
    return (integers(4, 4), *(integers(4, 4).sign() for _ in range(4)))


def test_sharded_step():
    module = capture(step, *step_args())
    pipeline = sharded(bucket_bytes=128, max_in_flight_bytes=128)
    reports = []
    check_same(module, step_args(), lambda graph: reports.append(pipeline.run(graph)))
    (report,) = reports
    assert [one.name for one in report.steps] == [
        *("bucket_all_gathers", "bucket_reduce_scatters", "bucket_all_reduces", "overlap")
    ]
    before, after = report.steps[0].before, report.steps[-1].after
    assert (before.num_collectives, before.num_waits) == (8, 8)
    assert (after.num_collectives, after.num_waits) == (4, 4)
    assert before.num_bytes == after.num_bytes == 8 * 64
    assert after.max_in_flight_bytes == 128
    lines = str(report).splitlines()
    assert lines[0].split("  ")[0] == "pass"
    assert "8 → 6" in lines[1]
    assert "6 → 4" in lines[2]
    assert pipeline.provides >= {Fact.EARLY_STARTS, Fact.LATE_WAITS, Fact.BOUNDED_BYTES}


@pytest.mark.parametrize("coalesced", [False, True])
def test_replicated_step(coalesced):
    def fn(x: Tensor) -> list[Tensor]:
        return [wait(all_reduce((x + i) / 2)) for i in range(4)]

    pipeline = replicated(bucket_size_mb=25, coalesced=coalesced)
    module = check_same(capture(fn, integers(4)), (integers(4),), pipeline.run)
    assert count_traffic(module.graph).num_collectives == 1


def test_what_is_missing_is_named_before_anything_runs():
    late = Pass(name="late", run=nothing, provides={"sorted"}, undoes={"fresh"})  # pyright: ignore
    needs = Pass(name="needs", run=nothing, requires=frozenset({"sorted"}))
    with pytest.raises(UsageError, match=r"needs requires 'sorted'.*no pass; move late before it"):
        Pipeline(passes=(needs, late))
    Pipeline(passes=(late, needs))
    Pipeline(passes=(needs,), given=frozenset({"sorted"}))
    undoes = Pass(name="undoes", run=nothing, undoes=frozenset({"sorted"}))
    with pytest.raises(UsageError, match=r"late, undoes; undone by undoes; move it before undoes"):
        Pipeline(passes=(late, undoes, needs))
    assert Pipeline(passes=(late,), given=frozenset({"fresh"})).provides == {"sorted"}


def test_wrong_passes_are_refused():
    with pytest.raises(UsageError, match="an empty one"):
        Pass(name="", run=nothing)
    with pytest.raises(UsageError, match="expected a set for requires, got 'x'"):
        Pass(name="a", run=nothing, requires="x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="both provides and undoes 'x'"):
        Pass(name="a", run=nothing, provides=frozenset("x"), undoes=frozenset("x"))
    with pytest.raises(UsageError, match="expected a function of a graph, got 3"):
        Pass(name="a", run=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="got a more than once"):
        Pipeline(passes=(Pass(name="a", run=nothing), Pass(name="a", run=nothing)))


def test_editing_makes_another_pipeline_that_is_checked():
    pipeline = sharded(bucket_bytes=128, max_in_flight_bytes=None)
    mine = Pass(name="mine", run=nothing)
    names = [one.name for one in pipeline.passes]
    edited = pipeline.before("overlap", mine).without("mine").after("overlap", mine)
    assert [one.name for one in edited.passes] == [*names, "mine"]
    assert [one.name for one in pipeline.passes] == names
    with pytest.raises(UsageError, match="got 'nowhere'"):
        pipeline.without("nowhere")
    kept = pipeline.replacing(
        "bucket_reduce_scatters",
        Pass(name="keep", run=nothing, provides=frozenset({Fact.BUCKETED_REDUCE_SCATTERS})),
    )
    module = check_same(capture(step, *step_args()), step_args(), kept.run)
    assert count_traffic(module.graph).num_collectives == 2 + 4
    assert "2. keep\n   provides: reduce-scatters are in buckets" in str(kept)


def test_buckets_come_first_if_at_all():
    pipeline = sharded(bucket_bytes=128, max_in_flight_bytes=None)
    without = pipeline.without("bucket_reduce_scatters")
    assert Fact.BUCKETED_REDUCE_SCATTERS not in without.provides
    module = check_same(capture(step, *step_args()), step_args(), without.run)
    assert count_traffic(module.graph).num_collectives == 2 + 4
    late = pipeline.passes[1]
    with pytest.raises(
        UsageError, match=r"bucket_reduce_scatters requires .* undone by overlap; move it before"
    ):
        without.after("overlap", late)


def test_a_pass_that_breaks_a_graph_is_caught():
    def reverse(graph: fx.Graph) -> None:
        first, second, *_ = (node for node in graph.nodes if node.op == "call_function")
        second.append(first)

    def lie(graph: fx.Graph) -> None:
        node = list(graph.nodes)[-2]
        node.meta["val"] = node.meta["val"].double()

    def swallow(graph: fx.Graph) -> None:
        (output,) = graph.find_nodes(op="output")
        output.args = (output.args[0][:-1],)  # pyright: ignore

    with pytest.raises(
        InvariantError, match=r"pass swallow .* the 5 inputs and 5 outputs .* and 4"
    ):
        Pipeline(passes=(Pass(name="swallow", run=swallow),)).run(capture(step, *step_args()).graph)
    with pytest.raises(InvariantError, match=r"pass reverse broke the graph: .*used before"):
        Pipeline(passes=(Pass(name="reverse", run=reverse),)).run(capture(step, *step_args()).graph)
    liar = Pass(name="lie", run=lie)
    with pytest.raises(InvariantError, match=r"pass lie .*metadata of 1 nodes is wrong"):
        Pipeline(passes=(liar,)).run(capture(step, *step_args()).graph)
    Pipeline(passes=(liar,), verify=False).run(capture(step, *step_args()).graph)


def test_old_inconsistencies_are_no_fault_of_the_passes():
    graph = capture(step, *step_args()).graph
    node = list(graph.nodes)[-2]
    node.meta["val"] = node.meta["val"].double()
    sharded(bucket_bytes=128, max_in_flight_bytes=None).run(graph)


def test_docs_list_all_passes_in_their_order():
    text = (Path(__file__).parents[4] / "docs" / "passes.md").read_text(encoding="utf-8")
    listed: list[tuple[str, str, str]] = []
    stage = ""
    for stage_cell, name, targets in re.findall(
        r"^\| (\w*) ?\| `(\w+)` \| ([^|]+) \| ", text, re.M
    ):
        stage = stage_cell or stage
        listed.append((stage, name, targets))
    for target in (Target.DIRECT, Target.INDUCTOR):
        lines = stages(target).items()
        passes = [(stage, one.name) for stage, line in lines for one in line.passes]
        expected = [
            (stage, name)
            for stage, name, targets in listed
            if targets == "all" or target in targets
        ]
        assert passes == expected
