"""What the engine did, action by action, for whoever watches: the trainer, the report, tests.

The names are the machine's (`ActionKind`), in the order in which it asked. The engine records only
while a `Recorder` is attached; otherwise it pays one `is None`. A mark is a host time on CPU and a
CUDA event on the current stream on CUDA, so that recording never synchronises; times are resolved
when `Recorder.actions` is called.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Container
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch.profiler import record_function

from shoal.step.action import Action, ActionKind, described
from shoal.step.unit_step import UnitStep

OPTIMIZER: Final = "optimizer"
"""What the machine has no name for, since it is the trainer's: clipping, the optimizer's step."""

Kind = ActionKind | Literal["optimizer"]

EXPOSED = frozenset({ActionKind.WAIT, ActionKind.CANCEL, ActionKind.FINISH})
"""The kinds whose time is communication that compute did not hide."""

_ENDED_BY: dict[ActionKind, tuple[ActionKind, ...]] = {
    ActionKind.GATHER: (ActionKind.WAIT, ActionKind.CANCEL),
    ActionKind.REDUCE: (ActionKind.FINISH,),
}
"""Collectives are in flight until the host, or the stream, has waited for them."""

_COMPUTED = (ActionKind.FORWARD, ActionKind.BACKWARD)
_AFTER_COMPUTE = frozenset(
    {ActionKind.TAKE, ActionKind.SUM, ActionKind.REST, ActionKind.KEEP, ActionKind.FREE}
)
"""The actions of which the first says that a unit has computed."""

_LASTING = frozenset({*_COMPUTED, *_ENDED_BY})
"""The kinds that another action ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAction:
    """One action as it was performed: what, for which unit, from when to when.

    A gather and a reduction last until they were waited for, forward and backward until the unit
    has computed, waits until the bytes are there, all others until they are done.
    """

    kind: Kind
    unit: str
    start_us: float
    end_us: float
    num_bytes: int = 0
    """Gathered, reduced, or freed."""

    def __post_init__(self) -> None:
        if self.end_us < self.start_us:
            raise ValueError(f"{self.kind} of {self.unit!r} ends before it starts: {self!r}")

    @property
    def duration_us(self) -> float:
        """How long it lasted."""
        return self.end_us - self.start_us

    def __str__(self) -> str:
        return described(self.kind, self.unit, self.num_bytes)


TimeMark = float | torch.cuda.Event


class Running:
    """An action that is being performed, or is over and has no times yet."""

    __slots__ = ("end", "kind", "num_bytes", "span", "start", "unit")

    def __init__(self, kind: Kind, unit: str, start: TimeMark) -> None:
        self.kind: Kind = kind
        self.unit = unit
        self.start = start
        self.end: TimeMark | None = None
        self.num_bytes = 0
        self.span: record_function | None = None

    def close_span(self) -> None:
        """End its line in the profiler's trace."""
        span, self.span = self.span, None
        if span is not None:
            span.__exit__(None, None, None)


class Recorder:
    """Collects the actions of a step; `print(recorder)` shows them as `print(plan)` does.

    `named` gives each a line of its own in the trace of torch's profiler: `shoal gather blocks.1`.
    Those of forward and backward are as long as the unit computes, others as long as the host
    takes to perform them.
    """

    def __init__(self, device: torch.device, *, named: bool = False) -> None:
        self._device = device
        self._named = named
        self._performed: list[Running] = []
        self._open: dict[tuple[ActionKind, UnitStep], deque[Running]] = {}
        """Those that another action ends, oldest first."""
        self._origin = self.mark()

    def mark(self) -> TimeMark:
        """Take the present moment: of the host on CPU, of the current stream on CUDA."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def add(self, kind: Kind, unit: str, start: TimeMark, end: TimeMark) -> None:
        """Note something that happened between two marks."""
        running = Running(kind, unit, start)
        running.end = end
        self._performed.append(running)

    def begin(self, action: Action) -> Running:
        """An action is about to be performed."""
        kind, step = action
        now = self.mark()
        if kind in _AFTER_COMPUTE:
            for computed in _COMPUTED:
                self._end_open(computed, step, now)
        running = Running(kind, step.name, now)
        if self._named:
            running.span = record_function(f"shoal {kind} {step.name}")
            running.span.__enter__()
        self._performed.append(running)
        if kind in _LASTING:
            waiting = self._open.setdefault((kind, step), deque())
            if kind is not ActionKind.REDUCE:  # what had begun before was given up
                waiting.clear()
            waiting.append(running)
        return running

    def end(self, action: Action, running: Running) -> None:
        """It was performed; says nothing of those that another action ends, or ended before."""
        kind, step = action
        if kind not in _COMPUTED:
            running.close_span()
        if kind in _LASTING or running.end is not None:
            return
        running.end = now = self.mark()
        for lasting, ends in _ENDED_BY.items():
            if kind in ends:
                self._end_open(lasting, step, now)

    def _end_open(self, kind: ActionKind, step: UnitStep, now: TimeMark) -> None:
        waiting = self._open.get((kind, step))
        if waiting:
            ended = waiting.popleft()
            ended.end = now
            ended.close_span()

    def forget_open(self) -> None:
        """What has begun will not end: the step was given up."""
        for waiting in self._open.values():
            for running in waiting:
                running.close_span()
        self._open.clear()

    def actions(self, kinds: Container[Kind] | None = None) -> list[RecordedAction]:
        """What was performed, with times in µs since the recorder was made, in order.

        Of some kinds, or of all; what has not ended is not among it. Synchronises on CUDA.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [
            RecordedAction(
                kind=one.kind,
                unit=one.unit,
                start_us=self._us(one.start),
                end_us=self._us(one.end),
                num_bytes=one.num_bytes,
            )
            for one in self._performed
            if one.end is not None and (kinds is None or one.kind in kinds)
        ]

    def __str__(self) -> str:
        return "\n".join(map(str, self.actions()))

    def _us(self, mark: TimeMark) -> float:
        origin = self._origin
        if isinstance(mark, torch.cuda.Event):
            assert isinstance(origin, torch.cuda.Event)
            return origin.elapsed_time(mark) * 1e3
        assert not isinstance(origin, torch.cuda.Event)
        return (mark - origin) * 1e6
