"""Communication beside compute, as the profiler saw it.

Compute is a kernel that spins for a known time, and so is the modelled network. The device is held
up until the host has launched a whole step, so what overlaps is decided by the order between
streams alone, and neither by the host's speed nor by the device's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from gpu.runtime.conftest import Join
from shoal._torch import cuda
from shoal.comm.collectives import Kind
from shoal.comm.modelled import ModelledGroup, Network
from shoal.fsdp import MixedPrecisionPolicy, fully_shard
from shoal.layout import Even, Flat, Layout, Whole

# The profiler has remarks on how it is used.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

DIM = 256
NUM_BLOCKS = 5
FORWARD_US, BACKWARD_US = 2000.0, 5000.0
COLLECTIVE_US = 1500.0
"""Less than a block's forward; a gather and a reduction take less than its backward."""
LEAD_US = 150_000.0
"""For the host to launch a step, with the profiler watching."""

SLOW = Network("slow", None, COLLECTIVE_US)
FULL = MixedPrecisionPolicy()
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def busy(duration_us: float) -> None:
    """Occupy the current stream."""
    cuda.spin(duration_us)


class Busy(torch.autograd.Function):
    """Takes its time in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        busy(FORWARD_US)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        busy(BACKWARD_US)
        return grad.clone()


class Block(nn.Module):
    """A unit: few parameters, much time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Busy.apply(self.linear(x))  # pyright: ignore[reportReturnType]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When a kernel ran, in µs."""

    start: float
    end: float

    def beside(self, other: Span) -> float:
        """How much of this one ran while the other did, as a fraction."""
        shared = min(self.end, other.end) - max(self.start, other.start)
        return max(shared, 0.0) / (self.end - self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The spins of one step, by what they stand for."""

    forward: Sequence[Span]
    """By block."""
    backward: Sequence[Span]
    """By block."""
    gathers: Sequence[Span]
    """In the order of launches: the root's, each block's, then back again."""
    reductions: Sequence[Span]

    @property
    def elapsed_us(self) -> float:
        """From the first spin to the last."""
        spans = [*self.forward, *self.backward, *self.gathers, *self.reductions]
        return max(s.end for s in spans) - min(s.start for s in spans)


def _total(spans: Sequence[Span]) -> float:
    return sum(span.end - span.start for span in spans)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Kind]:
    """The kinds of the collectives, in the order in which the link carries them."""
    kinds: list[Kind] = []
    count = ModelledGroup._count

    def noting(self: ModelledGroup, kind: Kind, num_bytes: int) -> None:
        kinds.append(kind)
        count(self, kind, num_bytes)

    monkeypatch.setattr(ModelledGroup, "_count", noting)
    return kinds


def sharded(**options: Any) -> Any:
    torch.manual_seed(0)
    model = Model().cuda()
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def record(step: Callable[[], None], launched: list[Kind], folder: Path) -> Timeline:
    """Run a step that was run before, held up until it is launched, and read the profile."""
    step()
    busy(LEAD_US)
    step()  # held up too, so that the host has what it needs to run ahead
    torch.cuda.synchronize()
    launched.clear()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        busy(LEAD_US)
        ahead = torch.cuda.current_stream().record_event()
        step()
        assert not ahead.query(), "the host was held up: nothing can be said of the overlap"
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    return _timeline(json.loads((folder / "trace.json").read_text()), launched)


def _timeline(trace: Any, launched: Sequence[Kind]) -> Timeline:
    spins = sorted(
        (e for e in trace["traceEvents"] if e.get("cat") == "kernel" and "spin" in e["name"]),
        key=lambda event: event["ts"],
    )
    compute: list[Span] = []
    link: list[Span] = []  # on several streams, yet one after another in the order of launches
    for event in spins:
        is_compute = event["args"]["stream"] == spins[0]["args"]["stream"]
        span = Span(start=event["ts"], end=event["ts"] + event["dur"])
        (compute if is_compute else link).append(span)
    lead, *compute = compute
    assert lead.end - lead.start > LEAD_US / 2
    assert len(compute) == 2 * NUM_BLOCKS
    carried = list(zip(launched, link, strict=True))
    return Timeline(
        forward=compute[:NUM_BLOCKS],
        backward=compute[: NUM_BLOCKS - 1 : -1],
        gathers=[span for kind, span in carried if kind is Kind.ALL_GATHER],
        reductions=[span for kind, span in carried if kind is Kind.REDUCE_SCATTER],
    )


def record_step(model: nn.Module, launched: list[Kind], folder: Path) -> Timeline:
    x = torch.randn(4, DIM, device="cuda")

    def step() -> None:
        model.zero_grad()
        model(x).backward()

    return record(step, launched, folder)


@pytest.mark.parametrize(
    ("layout", "policy"),
    [(Even(), FULL), (Even(), HALF), (Flat(), FULL), (Flat(), HALF), (Whole(), HALF)],
    ids=["even", "even in bf16", "flat", "flat in bf16", "whole in bf16"],
)
def test_a_step_hides_its_communication(
    join: Join, launched: list[Kind], tmp_path: Path, layout: Layout, policy: MixedPrecisionPolicy
) -> None:
    join(SLOW)
    timeline = record_step(sharded(layout=layout, mp_policy=policy), launched, tmp_path)
    forward, backward = timeline.forward, timeline.backward
    # The root keeps its parameters between forward and backward, and the last block may.
    gathers, again = timeline.gathers[1 : NUM_BLOCKS + 1], timeline.gathers[:NUM_BLOCKS:-1]
    assert len(again) in (NUM_BLOCKS - 1, NUM_BLOCKS)
    assert len(timeline.reductions) == NUM_BLOCKS + 1
    reductions = timeline.reductions[-2::-1]  # the root's comes last
    for i in range(NUM_BLOCKS - 1):
        assert gathers[i + 1].beside(forward[i]) > 0.9, f"forward gathers block {i + 1} too late"
        assert gathers[i].end <= forward[i].start, f"block {i} computed before its parameters came"
        assert again[i].beside(backward[i + 1]) > 0.9, f"backward gathers block {i} too late"
        assert again[i].end <= backward[i].start, f"block {i} went back without its parameters"
        assert reductions[i + 1].beside(backward[i]) > 0.9, f"block {i + 1} is reduced too late"
        assert reductions[i + 1].start >= backward[i + 1].end, f"block {i + 1} reduced too early"
    # At most two gathers before the first block, one at the turn and two reductions at the end
    # have nothing to hide behind.
    communication = [*timeline.gathers, *timeline.reductions]
    exposed_us = timeline.elapsed_us - _total([*forward, *backward])
    assert exposed_us < _total(communication) * 5.5 / len(communication)


def test_reductions_in_several_steps_are_hidden_too(
    join: Join, launched: list[Kind], tmp_path: Path
) -> None:
    """Where a division follows the collective, on a stream of the engine's own."""
    join(SLOW)
    model = sharded()
    for module in (model, *model.blocks):
        module.set_force_sum_reduction_for_comms(True)
    timeline = record_step(model, launched, tmp_path)
    reductions = timeline.reductions[-2::-1]  # the root's comes last
    for i in range(NUM_BLOCKS - 1):
        assert reductions[i + 1].beside(timeline.backward[i]) > 0.9


def test_parameters_that_are_kept_are_gathered_once(
    join: Join, launched: list[Kind], tmp_path: Path
) -> None:
    join(SLOW)
    timeline = record_step(sharded(reshard_after_forward=False), launched, tmp_path)
    assert len(timeline.gathers) == 1 + NUM_BLOCKS
    for i in range(NUM_BLOCKS - 1):
        assert timeline.gathers[i + 2].beside(timeline.forward[i]) > 0.9
