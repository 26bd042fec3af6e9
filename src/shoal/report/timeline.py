"""The timeline of one step: read, laid out in lanes, drawn with time to the right.

    lane              row
    forward           0   |---------------- root ----------------|
                      1     |-- layers.0 --||-- layers.1 --|
    gather            0   |- layers.0 -|   |- layers.2 -|
                      1        |- layers.1 -|

A lane holds actions of the same sort, by the machine's names. Those that overlap in time go to
different rows. Bars stretch with the page; labels are HTML over them, as wide as their bars. A
label is a unit's whole name. Where it does not fit, the browser wraps it to a second line, which
the style sheet hides: so a label is seen whole or not at all, at any width and without a script.
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
from shoal.runtime.recorder import OPTIMIZER, Kind, RecordedAction
from shoal.step.action import ActionKind

_MOST_BYTES = 1 << 26
_MOST_CHARACTERS = 200

WIDEST_PX = 1200
"""The widest that the style sheet lets the page be."""

_CHARACTER_PX = 4
"""A small width of one character: a label for which even that is too much can never be seen."""

_ROW_PX = 20
_LANE_PX = 150
_GAP_PX = 10


class _Lane(NamedTuple):
    """Which kinds are drawn in a lane, in which colour, and what more the legend says of them."""

    css: str
    kinds: tuple[Kind, ...]
    remark: str = ""

    @property
    def name(self) -> str:
        """The names of its kinds."""
        return ", ".join(self.kinds)


_LANES = (
    _Lane("forward", (ActionKind.FORWARD,)),
    _Lane("backward", (ActionKind.BACKWARD,)),
    _Lane("gather", (ActionKind.GATHER,), "in flight"),
    _Lane("gather", (ActionKind.COPY, ActionKind.DISCARD), "of shards from the host"),
    _Lane(
        "exposed",
        (ActionKind.WAIT, ActionKind.FINISH, ActionKind.CANCEL),
        "exposed communication",
    ),
    _Lane("reduce", (ActionKind.REDUCE,), "in flight"),
    _Lane("free", (ActionKind.FREE, ActionKind.KEEP, ActionKind.DROP)),
    _Lane("gradients", (ActionKind.TAKE, ActionKind.SUM, ActionKind.PACK, ActionKind.PLACE)),
    _Lane("optimizer", (OPTIMIZER,)),
)
"""From top to bottom. Kinds that are in none take no time and move no bytes."""

_CSS: dict[Kind, str] = {kind: lane.css for lane in _LANES for kind in lane.kinds}

_LEGEND = [
    LegendEntry(f"{lane.name}: {lane.remark}" if lane.remark else lane.name, lane.css)
    for lane in _LANES
]

_FORMER_KINDS = {"gather_wait": ActionKind.WAIT, "reduce_wait": ActionKind.FINISH}
"""What files of earlier runs call them, in a list of 'events'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """What one rank did in one step."""

    step: int
    rank: int
    actions: tuple[RecordedAction, ...]
    host: str = ""
    device: str = ""
    """What the device calls itself; "" for CPUs, and in files of earlier runs."""


Rows = tuple[tuple[RecordedAction, ...], ...]
"""The actions of a lane; no two of a row overlap."""


def lanes(timeline: StepTimeline) -> dict[str, Rows]:
    """Sort a step's actions into all lanes; a lane without actions has no rows."""
    return {
        lane.name: pack(action for action in timeline.actions if action.kind in lane.kinds)
        for lane in _LANES
    }


def pack(actions: Iterable[RecordedAction]) -> Rows:
    """Put actions into the fewest rows without overlap: each into the highest row that is free.

    Of those that start together the longest comes first, so that a module's forward lies above
    those of the modules it contains.
    """
    rows: list[list[RecordedAction]] = []
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    for action in sorted(actions, key=lambda action: (action.start_us, -action.end_us)):
        while busy and busy[0][0] <= action.start_us:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row = len(rows)
            rows.append([])
        rows[row].append(action)
        heapq.heappush(busy, (action.end_us, row))
    return tuple(tuple(row) for row in rows)


def read_timeline(path: Path) -> tuple[StepTimeline, list[str]]:
    """Read `timeline.json`; actions that cannot be read are named in the second result.

    Raises ValueError when the file as a whole is not a timeline.
    """
    content = json.loads(read_regular(path, _MOST_BYTES))
    fields = content if isinstance(content, dict) else {}
    performed = fields.get("actions", fields.get("events"))
    if not isinstance(performed, list):
        raise ValueError("expected an object with a list 'actions'")
    actions: list[RecordedAction] = []
    problems: list[str] = []
    for number, action in enumerate(performed, start=1):
        try:
            actions.append(_action(action))
        except ValueError as error:
            problems.append(f"{path.name}, action {number}: {error}; the action was left out")
    step, rank = fields.get("step"), fields.get("rank")
    if not isinstance(step, int) or not isinstance(rank, int):
        raise ValueError(
            f"expected whole numbers 'step' and 'rank', got {short(step)} and {short(rank)}"
        )
    host, device = (str(fields.get(name, ""))[:_MOST_CHARACTERS] for name in ("host", "device"))
    timeline = StepTimeline(step=step, rank=rank, actions=tuple(actions), host=host, device=device)
    return timeline, problems


def _action(fields: object) -> RecordedAction:
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object, got {short(fields)}")
    unit, num_bytes = fields.get("unit"), fields.get("num_bytes", 0)
    if not isinstance(unit, str):
        raise ValueError(f"unit should be a name, got {short(unit)}")
    kind = _kind(fields.get("kind"))
    start_us, end_us = (_time(fields, name) for name in ("start_us", "end_us"))
    if isinstance(num_bytes, bool) or not isinstance(num_bytes, int) or not 0 <= num_bytes < 2**63:
        raise ValueError(f"num_bytes should be a number of bytes, got {short(num_bytes)}")
    return RecordedAction(
        kind=kind, unit=unit, start_us=start_us, end_us=end_us, num_bytes=num_bytes
    )


def _kind(name: object) -> Kind:
    if name == OPTIMIZER:
        return OPTIMIZER
    try:
        return _FORMER_KINDS.get(str(name)) or ActionKind(name)
    except ValueError:
        raise ValueError(f"kind should be the name of an action, got {short(name)}") from None


def _time(fields: dict[str, object], name: str) -> float:
    value = fields.get(name)
    # 1e18 µs is longer than the universe is old; an infinite or NaN time fails here as well.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e18:
        raise ValueError(f"{name} should be a number of µs, got {short(value)}")
    return float(value)


def draw_timeline(timeline: StepTimeline) -> str:
    """Draw a step; there must be at least one action."""
    by_start = sorted(timeline.actions, key=lambda action: action.start_us)
    start_us, end_us = by_start[0].start_us, max(action.end_us for action in by_start)
    length_ms = max((end_us - start_us) / 1e3, 1e-3)
    time = Axis(low=0.0, high=length_ms)
    # Numbered as they first appear, so that neighbours get different tones.
    units = list(dict.fromkeys(action.unit for action in by_start))
    tones = {unit: ("even", "odd")[number % 2] for number, unit in enumerate(units)}
    names, shapes, labels, height_px = "", "", "", 0.0
    for name, rows in lanes(timeline).items():
        # Many rows become thin ones.
        row_px = min(_ROW_PX, _LANE_PX / max(1, len(rows)))
        lane_px = max(_ROW_PX, row_px * len(rows)) + _GAP_PX
        names += f'<span style="height:{lane_px:.1f}px">{name}</span>'
        for index, row in enumerate(rows):
            top_px = height_px + _GAP_PX / 2 + index * row_px
            for action in row:
                left = time.at((action.start_us - start_us) / 1e3)
                width = time.at((action.end_us - start_us) / 1e3) - left
                shapes += _bar(action, tones[action.unit], left, width, top_px, row_px)
                labels += _label(action, left, width, top_px, row_px)
        height_px += lane_px
        shapes += f'<path class="grid" d="M0 {height_px:.1f}H1000"/>'
    ticks = time.ticks(8)
    grid = "".join(f"M{tick.at * 1000:.1f} 0V{height_px:.1f}" for tick in ticks)
    summary = (
        f"What rank {timeline.rank} did in step {timeline.step}, {duration(length_ms / 1e3)} long"
    )
    return (
        f'{legend(_LEGEND)}<div class="gantt"><div class="lanes">{names}</div>'
        f'<div class="track"><div class="spans" tabindex="0" role="group" '
        f'aria-label="{escape(summary)}: arrow keys go from action to action" '
        f'style="height:{height_px:.1f}px">'
        f'<svg viewBox="0 0 1000 {height_px:.1f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(summary)}"><path class="grid" d="{grid}"/>'
        f"{shapes}</svg>{labels}</div>{below(ticks, 'time in the step, ms')}</div></div>"
    )


def _bar(
    action: RecordedAction, tone: str, left: float, width: float, top_px: float, height_px: float
) -> str:
    text = f"{action.unit or 'root'}\n{action.kind}\n{duration(action.duration_us / 1e6)}"
    if action.num_bytes:
        text += f"\n{size(action.num_bytes)}"
    # What is shorter than a pixel is still drawn as a hairline: a wait that is there is seen.
    return (
        f'<rect class="{_CSS[action.kind]} {tone}" x="{left * 1000:.2f}" y="{top_px + 1:.1f}" '
        f'width="{max(width * 1000, 0.6):.2f}" height="{max(height_px - 2, 1.5):.1f}" '
        f'data-said="{escape(text)}"/>'
    )


def _label(
    action: RecordedAction, left: float, width: float, top_px: float, height_px: float
) -> str:
    name = action.unit or "root"
    if height_px < 14 or len(name) * _CHARACTER_PX > width * WIDEST_PX:
        return ""
    return (
        f'<span class="label on-{_CSS[action.kind]}" style="left:{left * 100:.3f}%;'
        f'width:{width * 100:.3f}%;top:{top_px:.1f}px"><b>{escape(name)}</b></span>'
    )


def list_actions(timeline: StepTimeline) -> str:
    """Tell a step action by action, as a table: when it began, how long it took, its bytes."""
    by_start = sorted(timeline.actions, key=lambda action: action.start_us)
    rows = "".join(
        f"<tr><td>{(action.start_us - by_start[0].start_us) / 1e3:.3f}</td>"
        f"<td>{duration(action.duration_us / 1e6)}</td><td>{action.kind}</td>"
        f"<td>{escape(action.unit or 'root')}</td>"
        f"<td>{size(action.num_bytes) if action.num_bytes else ''}</td></tr>"
        for action in by_start
    )
    heads = "".join(
        f'<th scope="col">{name}</th>' for name in ("at, ms", "took", "action", "unit", "bytes")
    )
    return (
        "<details><summary>Show the actions as a table</summary>"
        f'<div class="scroll" tabindex="0"><table class="actions">'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )
