"""A record for each compilation, with what the graphs are and where the time went."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from comm_graphs import stages as all_stages
from compile_compare import BACKEND
from shoal.aot import aot_function, nop
from shoal.compile.observe import forget, observation, records
from shoal.compile.observe.record import CacheUse
from shoal.compile.passes.pipeline import Target

pytestmark = pytest.mark.skipif(BACKEND != "shoal", reason="tests our own backend")


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_CACHE_DIR", str(tmp_path))
    forget()
    yield
    forget()


def program(x: Tensor, w: Tensor, counter: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    counter.add_(1)
    y = (x @ w).exp()
    z = y.sin().t()
    return z, z[0], y.sum()


def compiled_once() -> tuple[Tensor, Tensor, Tensor]:
    args = torch.randn(4, 6), torch.randn(6, 5, requires_grad=True), torch.zeros(())
    return torch.compile(program, backend="shoal", fullgraph=True)(*args)


def test_what_a_record_says() -> None:
    out = compiled_once()
    (record,) = records()
    assert (record.num_inputs, record.num_outputs, record.num_mutated) == (3, 3, 1)
    assert record.num_bases == 1
    assert record.trains
    assert record.num_nodes_before == 7
    assert record.num_nodes_forward > 4
    assert record.num_collectives == 0
    assert record.cache is CacheUse.STORED
    assert record.where.rpartition(":")[0] == __file__
    stages = ["key", "read", "analyse", "capture", "partition", "write", "compile"]
    assert list(record.seconds) == stages
    assert record.total_seconds == sum(record.seconds.values()) > 0
    (out[0].sum() + out[2]).backward()
    (record,) = records()
    assert list(record.seconds) == [*stages, "compile backward"]


def test_passes_are_those_of_the_pipeline_and_none_of_a_graph_that_the_cache_had() -> None:
    compiled_once()
    torch._dynamo.reset()
    compiled_once()
    traced, found = records()
    ran = {stage: [one.name for one in report.steps] for stage, report in traced.passes.items()}
    lines = all_stages(Target.DIRECT).items()
    expected = {stage: [one.name for one in line.passes] for stage, line in lines}
    assert ran == {
        stage: expected[stage] for stage in ("joint", "before_cut", "forward", "backward")
    }
    assert traced.passes["forward"].result_of("update_in_place") == 1
    assert found.cache is CacheUse.HIT
    assert not found.passes


def test_saved_bytes_are_those_of_what_autograd_keeps() -> None:
    out = compiled_once()
    node = out[2].grad_fn
    assert node is not None
    saved = node.saved_tensors  # type: ignore[attr-defined]
    (record,) = records()
    assert record.num_saved == len(saved)
    assert record.saved_bytes == sum(one.numel() * one.element_size() for one in saved)


def test_inference_saves_nothing() -> None:
    with torch.no_grad():
        compiled_once()
    (record,) = records()
    assert not record.trains
    assert (record.num_saved, record.saved_bytes, record.num_nodes_backward) == (0, 0, 0)
    assert "partition" not in record.seconds


def test_functions_compiled_straight_have_records() -> None:
    aot_function(torch.sin, fw_compiler=nop)(torch.ones(3))
    (record,) = records()
    assert record.cache is CacheUse.OFF
    assert (record.num_nodes_before, record.where) == (0, "")


def test_what_failed_leaves_no_record_and_old_ones_are_forgotten(monkeypatch) -> None:
    def fails(x: Tensor) -> Tensor:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        aot_function(fails, fw_compiler=nop)(torch.ones(3))
    assert records() == []
    for _ in range(observation.MOST_RECORDS + 2):
        with observation.observing():
            pass
    assert len(observation._kept) == observation.MOST_RECORDS
