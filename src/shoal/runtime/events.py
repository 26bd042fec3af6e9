"""Typed events of a step, for whoever wants to watch: the trainer's metrics, the report, tests.

The engine emits spans only while a `Recorder` is attached; otherwise it pays one `is None`.
A mark is a host time on CPU and a CUDA event on the current stream on CUDA, so that recording
never synchronises; times are resolved when `Recorder.events` is called.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum

import torch

from shoal.step.action import ActionKind


class EventKind(StrEnum):
    """What a span of time was spent on."""

    FORWARD = "forward"
    """A unit's module computes its forward."""
    BACKWARD = "backward"
    """A unit's module computes its backward."""
    GATHER = "gather"
    """An all-gather is in flight, from its launch until it was waited for."""
    GATHER_WAIT = "gather_wait"
    """Compute stands still until a unit's parameters are there: exposed communication."""
    REDUCE = "reduce"
    """A reduce-scatter is in flight, from its launch until it was waited for."""
    REDUCE_WAIT = "reduce_wait"
    """Compute stands still until reduced gradients are there: exposed communication."""
    OPTIMIZER = "optimizer"
    """The optimizer's step."""


EXPOSED = frozenset({EventKind.GATHER_WAIT, EventKind.REDUCE_WAIT})
"""The kinds whose time is communication that compute did not hide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One span of a step: what, for which unit, from when to when."""

    kind: EventKind
    unit: str
    start_us: float
    end_us: float
    num_bytes: int = 0
    """Of a gather the full parameters, of a reduction the gradient matrix."""

    def __post_init__(self) -> None:
        if self.end_us < self.start_us:
            raise ValueError(f"{self.kind} of {self.unit!r} ends before it starts: {self}")

    @property
    def duration_us(self) -> float:
        """How long the span lasted."""
        return self.end_us - self.start_us


TimeMark = float | torch.cuda.Event


class Recorder:
    """Collects the spans of a step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.actions: list[tuple[ActionKind, str]] = []
        """What the step machine asked for, unit by unit."""
        self._spans: list[tuple[EventKind, str, TimeMark, TimeMark, int]] = []
        self._origin = self.mark()

    def mark(self) -> TimeMark:
        """Take the present moment: of the host on CPU, of the current stream on CUDA."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def span(
        self, kind: EventKind, unit: str, start: TimeMark, end: TimeMark, num_bytes: int = 0
    ) -> None:
        """Note that `kind` happened for `unit` between two marks."""
        self._spans.append((kind, unit, start, end, num_bytes))

    def events(self) -> list[Event]:
        """Resolve every span to µs since the recorder was made; synchronises on CUDA."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [
            Event(
                kind=kind,
                unit=unit,
                start_us=self._us(start),
                end_us=self._us(end),
                num_bytes=num_bytes,
            )
            for kind, unit, start, end, num_bytes in self._spans
        ]

    def _us(self, mark: TimeMark) -> float:
        origin = self._origin
        if isinstance(mark, torch.cuda.Event):
            assert isinstance(origin, torch.cuda.Event)
            return origin.elapsed_time(mark) * 1e3
        assert not isinstance(origin, torch.cuda.Event)
        return (mark - origin) * 1e6
