"""How much of a step's communication lies under compute: intervals of time, as arithmetic.

gather   |------ in flight ------|
wait                  |-exposed--|
         |-overlapped-|            overlapped: 13 of 24
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.runtime.recorder import EXPOSED, RecordedAction
from shoal.step.action import ActionKind

Interval = tuple[float, float]


def overlapped_share(actions: Sequence[RecordedAction], kind: ActionKind) -> float | None:
    """The part of the time with a collective of a kind in flight in which nobody waited.

    None where none was in flight for any time.
    """
    flying = union(action for action in actions if action.kind == kind)
    total_us = length(flying)
    if total_us <= 0:
        return None
    waits = union(action for action in actions if action.kind in EXPOSED)
    return 1 - length(common(flying, waits)) / total_us


def union(actions: Iterable[RecordedAction]) -> list[Interval]:
    """The time in which any of the actions ran, in order, without overlap."""
    merged: list[Interval] = []
    for start, end in sorted((action.start_us, action.end_us) for action in actions):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The time that two unions share."""
    shared: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            shared.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return shared


def length(intervals: Iterable[Interval]) -> float:
    """How long all of them are together."""
    return sum(end - start for start, end in intervals)
