"""The timeline of one step: read, laid out in lanes, drawn with time to the right.

    lane              row
    forward           0   |---------------- root ----------------|
                      1     |-- layers.0 --||-- layers.1 --|
    gathers           0   |- layers.0 -|   |- layers.2 -|
                      1        |- layers.1 -|

A lane holds one sort of work. Spans of a lane that overlap in time go to different rows. Spans
stretch with the page; labels are HTML over them, as wide as their spans. A label is a unit's whole
name. Where it does not fit, the browser wraps it to a second line, which the style sheet hides: so
a label is seen whole or not at all, at any width and without a script.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from reprlib import repr as short

from shoal.files import read_regular
from shoal.report.axis import Axis
from shoal.report.chart import LegendEntry, legend
from shoal.report.number_format import duration, size
from shoal.runtime.events import Event, EventKind

_MOST_BYTES = 1 << 26

WIDEST_PX = 1200
"""The widest that the style sheet lets the page be."""

_CHARACTER_PX = 4
"""A small width of one character: a label for which even that is too much can never be seen."""

_ROW_PX = 20
_LANE_PX = 150
_GAP_PX = 10

_CSS = {
    EventKind.FORWARD: "forward",
    EventKind.BACKWARD: "backward",
    EventKind.GATHER: "gather",
    EventKind.GATHER_WAIT: "exposed",
    EventKind.REDUCE: "reduce",
    EventKind.REDUCE_WAIT: "exposed",
    EventKind.OPTIMIZER: "optimizer",
}

_TEXT_OF_KIND = {
    EventKind.GATHER: "gather in flight",
    EventKind.GATHER_WAIT: "waiting for a gather",
    EventKind.REDUCE: "reduce in flight",
    EventKind.REDUCE_WAIT: "waiting for a reduce",
}

_LEGEND = (
    LegendEntry(name="forward", css="forward"),
    LegendEntry(name="backward", css="backward"),
    LegendEntry(name="gather in flight", css="gather"),
    LegendEntry(name="waiting: exposed communication", css="exposed"),
    LegendEntry(name="reduce in flight", css="reduce"),
    LegendEntry(name="optimizer", css="optimizer"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """What one rank did during one step."""

    step: int
    rank: int
    events: tuple[Event, ...]

    @property
    def start_us(self) -> float:
        """When the first span starts."""
        return min((event.start_us for event in self.events), default=0.0)

    @property
    def end_us(self) -> float:
        """When the last span ends."""
        return max((event.end_us for event in self.events), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineLane:
    """One sort of work: its spans, in rows within which no two overlap."""

    name: str
    rows: tuple[tuple[Event, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            for before, after in pairwise(row):
                if after.start_us < before.end_us:
                    raise ValueError(f"two spans of lane {self.name!r} overlap: {before}, {after}")


LANES: dict[str, tuple[EventKind, ...]] = {
    "forward": (EventKind.FORWARD,),
    "backward": (EventKind.BACKWARD,),
    "gathers in flight": (EventKind.GATHER,),
    "waits": (EventKind.GATHER_WAIT, EventKind.REDUCE_WAIT),
    "reduces in flight": (EventKind.REDUCE,),
    "optimizer": (EventKind.OPTIMIZER,),
}
"""Every kind has its lane, from top to bottom."""


def lanes(timeline: StepTimeline) -> list[TimelineLane]:
    """Sort a step's spans into all lanes; a lane without spans has no rows."""
    return [
        TimelineLane(
            name=name, rows=pack(event for event in timeline.events if event.kind in kinds)
        )
        for name, kinds in LANES.items()
    ]


def pack(events: Iterable[Event]) -> tuple[tuple[Event, ...], ...]:
    """Put spans into the fewest rows without overlap: each into the highest row that is free.

    Of spans that start together the longest comes first, so that a module's span lies above
    those of the modules it contains.
    """
    rows: list[list[Event]] = []
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    for event in sorted(events, key=lambda event: (event.start_us, -event.end_us)):
        while busy and busy[0][0] <= event.start_us:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row = len(rows)
            rows.append([])
        rows[row].append(event)
        heapq.heappush(busy, (event.end_us, row))
    return tuple(tuple(row) for row in rows)


def read_timeline(path: Path) -> tuple[StepTimeline, list[str]]:
    """Read `timeline.json`; spans that cannot be read are named in the second result.

    Raises ValueError when the file as a whole is not a timeline.
    """
    content = json.loads(read_regular(path, _MOST_BYTES))
    if not isinstance(content, dict) or not isinstance(content.get("events"), list):
        raise ValueError("expected an object with a list 'events'")
    events: list[Event] = []
    problems: list[str] = []
    for number, fields in enumerate(content["events"], start=1):
        try:
            events.append(_event(fields))
        except ValueError as error:
            problems.append(f"{path.name}, span {number}: {error}; the span was left out")
    step, rank = content.get("step"), content.get("rank")
    if not isinstance(step, int) or not isinstance(rank, int):
        raise ValueError(
            f"expected whole numbers 'step' and 'rank', got {short(step)} and {short(rank)}"
        )
    return StepTimeline(step=step, rank=rank, events=tuple(events)), problems


def _event(fields: object) -> Event:
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object, got {short(fields)}")
    unit = fields.get("unit")
    if not isinstance(unit, str):
        raise ValueError(f"unit should be a name, got {short(unit)}")
    return Event(
        kind=EventKind(fields.get("kind")),
        unit=unit,
        start_us=_time(fields, "start_us"),
        end_us=_time(fields, "end_us"),
        num_bytes=_num_bytes(fields.get("num_bytes", 0)),
    )


def _num_bytes(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"num_bytes should be a number of bytes, got {short(value)}")
    return value


def _time(fields: dict[str, object], name: str) -> float:
    value = fields.get(name)
    # 1e18 µs is longer than the universe is old; an infinite or NaN time fails here as well.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e18:
        raise ValueError(f"{name} should be a number of µs, got {short(value)}")
    return float(value)


def draw_timeline(timeline: StepTimeline) -> str:
    """Draw a step; there must be at least one span."""
    start_us = timeline.start_us
    length_ms = max((timeline.end_us - start_us) / 1e3, 1e-3)
    time = Axis(low=0.0, high=length_ms)
    drawing = _Drawing(time=time, start_us=start_us, units=_unit_order(timeline))
    for lane in lanes(timeline):
        drawing.add(lane)
    return legend(_LEGEND) + drawing.html(
        f"What rank {timeline.rank} did in step {timeline.step}, {duration(length_ms / 1e3)} long"
    )


class _Drawing:
    """Collects shapes and labels from top to bottom."""

    def __init__(self, *, time: Axis, start_us: float, units: dict[str, int]) -> None:
        self._time = time
        self._start_us = start_us
        self._units = units
        self._shapes: list[str] = []
        self._labels: list[str] = []
        self._names: list[str] = []
        self._height_px = 0.0

    def add(self, lane: TimelineLane) -> None:
        """Draw a lane below those already there; many rows become thin ones."""
        top = self._height_px + _GAP_PX / 2
        row_px = min(_ROW_PX, _LANE_PX / max(1, len(lane.rows)))
        lane_px = max(_ROW_PX, row_px * len(lane.rows))
        self._names.append(f'<span style="height:{lane_px + _GAP_PX:.1f}px">{lane.name}</span>')
        for index, row in enumerate(lane.rows):
            for event in row:
                self._span(event, top + index * row_px, row_px)
        self._height_px += lane_px + _GAP_PX
        self._shapes.append(f'<path class="grid" d="M0 {self._height_px:.1f}H1000"/>')

    def html(self, summary: str) -> str:
        """Put the pieces together under a time axis."""
        ticks = self._time.ticks(8)
        grid = "".join(f"M{tick.at * 1000:.1f} 0V{self._height_px:.1f}" for tick in ticks)
        marks = "".join(
            f'<span style="left:{tick.at * 100:.2f}%">{tick.label}</span>' for tick in ticks
        )
        return (
            f'<div class="gantt"><div class="lanes">{"".join(self._names)}</div>'
            f'<div class="track"><div class="spans" style="height:{self._height_px:.1f}px">'
            f'<svg viewBox="0 0 1000 {self._height_px:.1f}" preserveAspectRatio="none" role="img" '
            f'aria-label="{escape(summary)}"><path class="grid" d="{grid}"/>'
            f"{''.join(self._shapes)}</svg>{''.join(self._labels)}</div>"
            f'<div class="x-ticks">{marks}</div><div class="x-name">time in the step, ms</div>'
            "</div></div>"
        )

    def _span(self, event: Event, top: float, height: float) -> None:
        left = self._time.at((event.start_us - self._start_us) / 1e3)
        width = self._time.at((event.end_us - self._start_us) / 1e3) - left
        tone = "even" if self._units[event.unit] % 2 == 0 else "odd"
        text_of_kind = _TEXT_OF_KIND.get(event.kind, event.kind.value)
        name = event.unit or "root"
        text = f"{name}\n{text_of_kind}\n{duration(event.duration_us / 1e6)}"
        if event.num_bytes:
            text += f"\n{size(event.num_bytes)}"
        # A span shorter than a pixel is still drawn as a hairline: a wait that is there is seen.
        self._shapes.append(
            f'<rect class="{_CSS[event.kind]} {tone}" x="{left * 1000:.2f}" y="{top + 1:.1f}" '
            f'width="{max(width * 1000, 0.6):.2f}" height="{max(height - 2, 1.5):.1f}" '
            f'data-said="{escape(text)}"/>'
        )
        if height >= 14 and len(name) * _CHARACTER_PX <= width * WIDEST_PX:
            self._labels.append(
                f'<span class="label on-{_CSS[event.kind]}" style="left:{left * 100:.3f}%;'
                f'width:{width * 100:.3f}%;top:{top:.1f}px"><b>{escape(name)}</b></span>'
            )


def _unit_order(timeline: StepTimeline) -> dict[str, int]:
    """Number the units as they first appear, so that neighbours get different tones."""
    order: dict[str, int] = {}
    for event in sorted(timeline.events, key=lambda event: event.start_us):
        order.setdefault(event.unit, len(order))
    return order
