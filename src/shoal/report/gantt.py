"""The timeline of a step, drawn: one lane per sort of work, time to the right.

Spans stretch with the page; labels are HTML over them, as wide as their spans. A label is a unit's
whole name. Where it does not fit, the browser wraps it to a second line, which the style sheet
hides: so a label is seen whole or not at all, at any width and without a script.
"""

from __future__ import annotations

from html import escape

from shoal.report.chart import Part, legend
from shoal.report.ticks import Axis
from shoal.report.timeline import Lane, Timeline, lanes
from shoal.report.units import duration
from shoal.runtime.events import Event, EventKind

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

_SAID = {
    EventKind.GATHER: "gather in flight",
    EventKind.GATHER_WAIT: "waiting for a gather",
    EventKind.REDUCE: "reduce in flight",
    EventKind.REDUCE_WAIT: "waiting for a reduce",
}

_KEYS = (
    Part(name="forward", css="forward"),
    Part(name="backward", css="backward"),
    Part(name="gather in flight", css="gather"),
    Part(name="waiting: exposed communication", css="exposed"),
    Part(name="reduce in flight", css="reduce"),
    Part(name="optimizer", css="optimizer"),
)


def gantt(timeline: Timeline) -> str:
    """Draw a step; there must be at least one span."""
    start_us = timeline.start_us
    length_ms = max((timeline.end_us - start_us) / 1e3, 1e-3)
    time = Axis(low=0.0, high=length_ms)
    drawing = _Drawing(time=time, start_us=start_us, units=_unit_order(timeline))
    for lane in lanes(timeline):
        drawing.add(lane)
    return legend(_KEYS) + drawing.html(
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

    def add(self, lane: Lane) -> None:
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
        said = _SAID.get(event.kind, event.kind.value)
        name = event.unit or "root"
        text = f"{name}\n{said}\n{duration(event.duration_us / 1e6)}"
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


def _unit_order(timeline: Timeline) -> dict[str, int]:
    """Number the units as they first appear, so that neighbours get different tones."""
    order: dict[str, int] = {}
    for event in sorted(timeline.events, key=lambda event: event.start_us):
        order.setdefault(event.unit, len(order))
    return order
