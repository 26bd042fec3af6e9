"""The spans of one step laid out in lanes; pure.

    lane              row
    forward           0   |---------------- root ----------------|
                      1     |-- layers.0 --||-- layers.1 --|
    gathers           0   |- layers.0 -|   |- layers.2 -|
                      1        |- layers.1 -|

A lane holds one sort of work. Spans of a lane that overlap in time go to different rows.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from reprlib import repr as short

from shoal.files import read_regular
from shoal.runtime.events import Event, EventKind

_MOST_BYTES = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
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
class Lane:
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


def lanes(timeline: Timeline) -> list[Lane]:
    """Sort a step's spans into all lanes; a lane without spans has no rows."""
    return [
        Lane(name=name, rows=pack(event for event in timeline.events if event.kind in kinds))
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


def read_timeline(path: Path) -> tuple[Timeline, list[str]]:
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
    return Timeline(step=step, rank=rank, events=tuple(events)), problems


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
    )


def _time(fields: dict[str, object], name: str) -> float:
    value = fields.get(name)
    # 1e18 µs is longer than the universe is old; an infinite or NaN time fails here as well.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e18:
        raise ValueError(f"{name} should be a number of µs, got {short(value)}")
    return float(value)
