"""Forecasts against what an H200 measured, and against arithmetic."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from plan_bench_history import memory_of
from shoal.bench.cases import CASES
from shoal.comm.network import FREE, INFINIBAND, Network
from shoal.errors import UsageError
from shoal.layout import Even, Flat, Rows, Whole
from shoal.low_precision import MXFP8, GatherFormat
from shoal.plan import Forecast, forecast
from shoal.runtime.policy import MixedPrecisionPolicy

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
MEASURED = "20261118-h200-eager-sections.json"
GIB = 1 << 30


@pytest.mark.parametrize(
    ("case", "engine"),
    [("B1-8", "plain"), ("B1-8", "shoal"), ("B1-8", "shoal-flat"), ("B3", "shoal")],
)
def test_memory_is_what_was_measured(case: str, engine: str) -> None:
    """On an H200, by torch's allocator: exactly, but for what differs in the steps before."""
    records = json.loads((RESULTS / MEASURED).read_text())["records"]
    (figures,) = (
        one["figures"] for one in records if (one["case"], one["engine"]) == (case, engine)
    )
    steps, training = memory_of(next(one for one in CASES if one.name == case), engine)
    for found, measured in ((steps, figures["memory"]), (training, figures["training_memory"])):
        assert found.allocated_peak_bytes / GIB == pytest.approx(
            measured["allocated_gib"], rel=0.0005
        )
        assert found.reserved_peak_bytes / GIB == pytest.approx(measured["reserved_gib"], rel=0.002)


DIM = 256


class Tiny(nn.Module):
    """A few layers."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def inputs() -> torch.Tensor:
    return torch.zeros(8, DIM)


def tiny(**settings: Any) -> Forecast:
    return forecast(Tiny, inputs, **{"world": 4, "network": FREE, **settings})


@pytest.mark.parametrize("layout", [Even(), Flat(), Rows()])
@pytest.mark.parametrize("world", [1, 4, 64])
def test_shards_and_state_are_a_part_of_the_model(layout: Any, world: int) -> None:
    found = tiny(world=world, layout=layout).memory.by_category
    numel, blocks = 4 * DIM * DIM / world, 64 * 512
    assert numel * 4 <= found["parameters"] <= numel * 4 + blocks
    assert numel * 8 <= found["optimizer state"] <= numel * 8 + blocks


def test_whole_matrices_are_one_ranks() -> None:
    assert tiny(layout=Whole()).memory.by_category["parameters"] >= 4 * DIM * DIM


class Deep(nn.Module):
    """Units that keep more than what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
            for _ in range(8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def deep(**settings: Any) -> Forecast:
    return forecast(Deep, lambda: torch.zeros(65536, DIM), **{"world": 64, **settings})


def test_checkpointing_needs_less_and_takes_longer() -> None:
    usual, checkpointed = deep(), deep(checkpointing=True)
    assert checkpointed.memory.allocated_peak_bytes < usual.memory.allocated_peak_bytes * 0.6
    assert checkpointed.time.compute_ms > usual.time.compute_ms * 1.1


def test_replicas_share_fewer_ranks() -> None:
    whole, halves = tiny(world=8), tiny(world=8, replicas=2)
    assert halves.memory.by_category["parameters"] == 2 * whole.memory.by_category["parameters"]


def test_a_slow_network_is_seen_where_compute_waits() -> None:
    slow = Network("slow", 1.0, 100.0)
    free, waiting = deep(network=FREE), deep(network=slow)
    assert free.time.exposed_ms < waiting.time.exposed_ms
    late = waiting.time.step_ms - free.time.step_ms
    assert late == pytest.approx(waiting.time.exposed_ms - free.time.exposed_ms, rel=0.05)
    assert {wait.moment.split()[0] for wait in waiting.time.waits} <= {"wait", "finish"}


def test_micro_batches_reduce_once() -> None:
    one, four = tiny(network=INFINIBAND), tiny(network=INFINIBAND, micro_batches=4)
    assert four.time.link_ms < 3.9 * one.time.link_ms
    assert four.time.compute_ms > 2.5 * one.time.compute_ms


def test_reducing_every_micro_batch_takes_the_link_longer_and_less_memory() -> None:
    sums = tiny(network=INFINIBAND, micro_batches=4)
    each = tiny(network=INFINIBAND, micro_batches=4, reduces_each=True)
    assert each.time.link_ms > 1.2 * sums.time.link_ms
    assert each.memory.allocated_peak_bytes < sums.memory.allocated_peak_bytes


def test_a_mesh_says_ranks_and_replicas() -> None:
    assert tiny(world=None, mesh=(2, 4)).memory == tiny(world=8, replicas=2).memory
    assert tiny(world=None, mesh=(8,)).memory == tiny(world=8).memory


def test_memory_grows_with_what_is_kept() -> None:
    """Nothing kept, a part kept within groups of ranks, everything kept."""
    freed, part, kept = (
        deep(world=8, reshard=reshard).memory.allocated_peak_bytes for reshard in (True, 2, False)
    )
    assert freed < part < kept


def test_checkpointing_of_some_units_lies_between() -> None:
    peaks = [
        deep(checkpointing=which).memory.allocated_peak_bytes for which in (False, [0, 5], 2, True)
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)


class Indexed(Tiny):
    """Asks its own indices for their values, as models do that build masks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[0], device=x.device)
        if (positions[1:] - positions[:-1] == 1).all():
            x = x[positions > 2]
        return super().forward(x)


def test_values_that_depend_on_no_input_are_known() -> None:
    found = forecast(Indexed, inputs, world=2)
    assert found.time.compute_ms > 0


class Spoilt(Tiny):
    """Asks for values that depend on an input, through memory that it wrote to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flags = torch.zeros(8, dtype=torch.bool, device=x.device)
        view = flags[2:]
        view.copy_(x[2:, 0] > 0)
        return super().forward(x) if flags.all() else x


def test_the_process_is_as_before() -> None:
    tiny()
    assert not dist.is_initialized()
    parameter = torch.zeros(4, device="meta", requires_grad=True)
    assert torch.nn.functional.dropout(parameter, 0.5).dtype is torch.float32
    parameter.grad = torch.zeros(4, device="meta")
    with pytest.raises(RuntimeError, match="fused"):
        torch.optim.AdamW([parameter], fused=True).step()


def test_inputs_are_counted() -> None:
    found = forecast(Tiny, lambda: torch.zeros(1024, DIM), world=2).memory
    assert found.by_category["inputs"] == 1024 * DIM * 4


class Branching(Tiny):
    """Its forward looks at values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else x


def on_cpu() -> nn.Module:
    model = Tiny()
    model.extra = nn.Parameter(torch.zeros(3, device="cpu"))
    return model


MISTAKES: list[tuple[str, Callable[[], object]]] = [
    ("the forward needs values", lambda: forecast(Branching, inputs, world=2)),
    ("the forward needs values", lambda: forecast(Spoilt, inputs, world=2)),
    ("unknown network 'nvlnk' .did you mean nvlink", lambda: tiny(network="nvlnk")),
    ("has 8 ranks, not world=4", lambda: tiny(mesh=(2, 4))),
    ("expected mesh=.shards,", lambda: tiny(mesh=(2, 2, 2))),
    ("divides the 4 ranks that shard, got 3", lambda: tiny(reshard=3)),
    ("checkpointing=0", lambda: tiny(checkpointing=0)),
    ("a number of ranks", lambda: tiny(world=None)),
    ("'extra' has memory", lambda: forecast(on_cpu, inputs, world=2)),
    ("world=3 and replicas=2", lambda: tiny(world=3, replicas=2)),
    ("unknown device 'h300' .did you mean h200", lambda: tiny(device="h300")),
    ("unknown network 'tin'", lambda: tiny(network="tin")),
    ("micro_batches=0", lambda: tiny(micro_batches=0)),
    ("a release of torch, as 2.13", lambda: tiny(torch_version="new")),
    ("pass loss=", lambda: forecast(Tiny, inputs, world=2, loss=None, units=_no_grad)),
]


def _no_grad(model: nn.Module) -> list[Any]:
    model.requires_grad_(False)
    return []


@pytest.mark.parametrize(("words", "mistake"), MISTAKES)
def test_mistakes_are_named(words: str, mistake: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match=words):
        mistake()
    assert not dist.is_initialized()


def test_gathers_in_few_bits_take_less_of_the_link_and_memory_on_the_way() -> None:
    def found(form: GatherFormat | None) -> Forecast:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, gather_format=form)
        return forecast(Tiny, lambda: torch.empty(8, DIM), world=8, policy=policy)

    plain, encoded = found(None), found(MXFP8())
    assert "gathered as MXFP8()" in encoded.plan
    assert encoded.time.link_ms < plain.time.link_ms
    more = [one.memory.by_category["gathered parameters"] for one in (encoded, plain)]
    bf16 = 2 * DIM * DIM
    assert more[0] - more[1] <= 2 * bf16 * (32 + 1) / 64  # of two units on the way
    assert more[0] > more[1]
