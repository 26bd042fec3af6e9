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
from pathlib import Path
from reprlib import repr as short
from typing import NamedTuple

from shoal.files import read_regular
from shoal.report.axis import Axis
from shoal.report.chart import LegendEntry, below, legend
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


class _Style(NamedTuple):
    """How the spans of a kind are drawn: in which lane, in which colour, under which name."""

    lane: str
    css: str
    text: str


_STYLES = {
    EventKind.FORWARD: _Style("forward", "forward", "forward"),
    EventKind.BACKWARD: _Style("backward", "backward", "backward"),
    EventKind.GATHER: _Style("gathers in flight", "gather", "gather in flight"),
    EventKind.GATHER_WAIT: _Style("waits", "exposed", "waiting for a gather"),
    EventKind.REDUCE: _Style("reduces in flight", "reduce", "reduce in flight"),
    EventKind.REDUCE_WAIT: _Style("waits", "exposed", "waiting for a reduce"),
    EventKind.OPTIMIZER: _Style("optimizer", "optimizer", "optimizer"),
}
"""Every kind has its lane; the lanes from top to bottom."""

_LEGEND = [
    LegendEntry("waiting: exposed communication" if css == "exposed" else text, css)
    for css, text in {style.css: style.text for style in _STYLES.values()}.items()
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """The spans of one rank in one step."""

    step: int
    rank: int
    events: tuple[Event, ...]


SpanRows = tuple[tuple[Event, ...], ...]
"""The spans of a lane; no two spans of a row overlap."""


def lanes(timeline: StepTimeline) -> dict[str, SpanRows]:
    """Sort a step's spans into all lanes; a lane without spans has no rows."""
    spans: dict[str, list[Event]] = {style.lane: [] for style in _STYLES.values()}
    for event in timeline.events:
        spans[_STYLES[event.kind].lane].append(event)
    return {name: pack(events) for name, events in spans.items()}


def pack(events: Iterable[Event]) -> SpanRows:
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
    unit, num_bytes = fields.get("unit"), fields.get("num_bytes", 0)
    if not isinstance(unit, str):
        raise ValueError(f"unit should be a name, got {short(unit)}")
    kind = EventKind(fields.get("kind"))
    start_us, end_us = (_time(fields, name) for name in ("start_us", "end_us"))
    if isinstance(num_bytes, bool) or not isinstance(num_bytes, int) or not 0 <= num_bytes < 2**63:
        raise ValueError(f"num_bytes should be a number of bytes, got {short(num_bytes)}")
    return Event(kind=kind, unit=unit, start_us=start_us, end_us=end_us, num_bytes=num_bytes)


def _time(fields: dict[str, object], name: str) -> float:
    value = fields.get(name)
    # 1e18 µs is longer than the universe is old; an infinite or NaN time fails here as well.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e18:
        raise ValueError(f"{name} should be a number of µs, got {short(value)}")
    return float(value)


def draw_timeline(timeline: StepTimeline) -> str:
    """Draw a step; there must be at least one span."""
    by_start = sorted(timeline.events, key=lambda event: event.start_us)
    start_us, end_us = by_start[0].start_us, max(event.end_us for event in by_start)
    length_ms = max((end_us - start_us) / 1e3, 1e-3)
    time = Axis(low=0.0, high=length_ms)
    # Numbered as they first appear, so that neighbours get different tones.
    units = list(dict.fromkeys(event.unit for event in by_start))
    tones = {unit: ("even", "odd")[number % 2] for number, unit in enumerate(units)}
    names, shapes, labels, height_px = "", "", "", 0.0
    for name, rows in lanes(timeline).items():
        # Many rows become thin ones.
        row_px = min(_ROW_PX, _LANE_PX / max(1, len(rows)))
        lane_px = max(_ROW_PX, row_px * len(rows)) + _GAP_PX
        names += f'<span style="height:{lane_px:.1f}px">{name}</span>'
        for index, row in enumerate(rows):
            top_px = height_px + _GAP_PX / 2 + index * row_px
            for event in row:
                left = time.at((event.start_us - start_us) / 1e3)
                width = time.at((event.end_us - start_us) / 1e3) - left
                shapes += _span(event, tones[event.unit], left, width, top_px, row_px)
                labels += _label(event, left, width, top_px, row_px)
        height_px += lane_px
        shapes += f'<path class="grid" d="M0 {height_px:.1f}H1000"/>'
    ticks = time.ticks(8)
    grid = "".join(f"M{tick.at * 1000:.1f} 0V{height_px:.1f}" for tick in ticks)
    summary = (
        f"What rank {timeline.rank} did in step {timeline.step}, {duration(length_ms / 1e3)} long"
    )
    return (
        f'{legend(_LEGEND)}<div class="gantt"><div class="lanes">{names}</div>'
        f'<div class="track"><div class="spans" style="height:{height_px:.1f}px">'
        f'<svg viewBox="0 0 1000 {height_px:.1f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(summary)}"><path class="grid" d="{grid}"/>'
        f"{shapes}</svg>{labels}</div>{below(ticks, 'time in the step, ms')}</div></div>"
    )


def _span(
    event: Event, tone: str, left: float, width: float, top_px: float, height_px: float
) -> str:
    style = _STYLES[event.kind]
    text = f"{event.unit or 'root'}\n{style.text}\n{duration(event.duration_us / 1e6)}"
    if event.num_bytes:
        text += f"\n{size(event.num_bytes)}"
    # A span shorter than a pixel is still drawn as a hairline: a wait that is there is seen.
    return (
        f'<rect class="{style.css} {tone}" x="{left * 1000:.2f}" y="{top_px + 1:.1f}" '
        f'width="{max(width * 1000, 0.6):.2f}" height="{max(height_px - 2, 1.5):.1f}" '
        f'data-said="{escape(text)}"/>'
    )


def _label(event: Event, left: float, width: float, top_px: float, height_px: float) -> str:
    name = event.unit or "root"
    if height_px < 14 or len(name) * _CHARACTER_PX > width * WIDEST_PX:
        return ""
    return (
        f'<span class="label on-{_STYLES[event.kind].css}" style="left:{left * 100:.3f}%;'
        f'width:{width * 100:.3f}%;top:{top_px:.1f}px"><b>{escape(name)}</b></span>'
    )
