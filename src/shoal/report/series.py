"""A series of points made small enough to draw and calm enough to read; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Point(NamedTuple):
    """One value at a step; NaN is a gap."""

    step: int
    value: float


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """Keep at most about `limit` points: the lowest and highest of each stretch, and each gap.

    Taking every n-th point would lose the spikes that a reader is looking for.
    """
    if len(points) <= limit:
        return list(points)
    kept: list[Point] = []
    for stretch in stretches(points, max(1, limit // 3)):
        finite = [point for point in stretch if math.isfinite(point.value)]
        chosen = set()
        if finite:
            chosen |= {min(finite, key=_value), max(finite, key=_value)}
        gap = next((point for point in stretch if not math.isfinite(point.value)), None)
        if gap is not None:
            chosen.add(gap)
        kept.extend(sorted(chosen, key=_step))
    return kept


def smooth(points: Sequence[Point]) -> list[Point]:
    """Average over the neighbours on both sides, a twentieth of the run in all; gaps stay gaps.

    The window is centred and shrinks towards the ends, so the curve neither lags nor drifts there.
    """
    sums, numbers = [0.0], [0]
    for point in points:
        finite = math.isfinite(point.value)
        sums.append(sums[-1] + (point.value if finite else 0.0))
        numbers.append(numbers[-1] + finite)
    reach = len(points) // 40
    result: list[Point] = []
    for index, (step, value) in enumerate(points):
        if not math.isfinite(value):
            result.append(Point(step, math.nan))
            continue
        side = min(reach, index, len(points) - 1 - index)
        low, high = index - side, index + side + 1
        result.append(Point(step, (sums[high] - sums[low]) / (numbers[high] - numbers[low])))
    return result


def stretches(items: Sequence[T], number: int) -> Iterator[Sequence[T]]:
    """Cut a sequence into at most `number` stretches whose lengths differ by at most one."""
    number = min(number, len(items))
    for index in range(number):
        yield items[len(items) * index // number : len(items) * (index + 1) // number]


def mean(values: Iterable[float]) -> float:
    """Average the finite values; NaN when there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def median(values: Iterable[float]) -> float:
    """Take the middle of the finite values; NaN when there is none."""
    finite = sorted(value for value in values if math.isfinite(value))
    if not finite:
        return math.nan
    middle = len(finite) // 2
    return finite[middle] if len(finite) % 2 else (finite[middle - 1] + finite[middle]) / 2


def _value(point: Point) -> float:
    return point.value


def _step(point: Point) -> int:
    return point.step
