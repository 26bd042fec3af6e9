"""Where an axis puts its marks; pure arithmetic in decimal, so that 0.1 + 0.2 reads 0.3."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

_STEPS = (Decimal(1), Decimal(2), Decimal("2.5"), Decimal(5), Decimal(10))


class Tick(NamedTuple):
    """One mark: where, as a share of the axis from 0 to 1, and what stands beside it."""

    at: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A range of values laid on 0 to 1, linear or logarithmic."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"an axis needs finite low < high, got {self.low} and {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"a logarithmic axis starts above 0, got {self.low}")

    def at(self, value: float) -> float:
        """Give a value's place: 0 at the low end, 1 at the high end, clamped to that range."""
        if self.log:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share))

    def ticks(self, most: int, *, whole: bool = False) -> tuple[Tick, ...]:
        """Choose up to `most` round values inside the range, with labels of equal precision.

        `whole` keeps to whole numbers: there is no step 1.5.
        """
        if self.log:
            return self._decades(most)
        step = _round_step(self.low, self.high, most)
        if whole:
            step = Decimal(math.ceil(step))
        first = math.ceil(_decimal(self.low) / step)
        last = math.floor(_decimal(self.high) / step)
        places = max(0, -int(step.normalize().as_tuple().exponent))
        top = max(abs(self.low), abs(self.high))
        # One choice for the whole axis: 0.00005 beside 1e−4 would not read as one scale.
        scientific = top > 1e9 or (top < 1e-3 and places > 4)
        return tuple(
            Tick(self.at(float(index * step)), _label(index * step, places, scientific=scientific))
            for index in range(first, last + 1)
        )

    def _decades(self, most: int) -> tuple[Tick, ...]:
        first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
        stride = max(1, math.ceil((last - first + 1) / most))
        return tuple(
            Tick(
                self.at(10.0**power),
                _label(Decimal(10) ** power, max(0, -power), scientific=not -4 <= power <= 6),
            )
            for power in range(first, last + 1, stride)
        )


def _label(value: Decimal, places: int, *, scientific: bool) -> str:
    if scientific:
        text = f"{value.normalize():e}".replace("+", "") if value else "0"
    else:
        text = f"{value:,.{places}f}"
    return text.replace("-", "−")


def axis_over(values: list[float], *, from_zero: bool = False, log: bool = False) -> Axis:
    """Make an axis that holds all finite values, a little air above; never of zero length."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return Axis(low=0.0, high=1.0)
    low, high = min(finite), max(finite)
    if log and low > 0:
        # Whole decades, so that there is a labelled line at either end.
        bottom, top = math.floor(math.log10(low)), math.ceil(math.log10(high))
        return Axis(low=10.0**bottom, high=10.0 ** max(top, bottom + 1), log=True)
    if from_zero:
        low = min(0.0, low)
    room = (high - low) * 0.06
    if high - low <= 1e-12 * max(abs(high), abs(low)):
        room = abs(high) * 0.1 or 1.0
    return Axis(low=low if from_zero and low == 0 else low - room, high=high + room)


def step_axis(first: int, last: int) -> Axis:
    """Make the axis of a run's steps, which may be one step long."""
    if first < last:
        return Axis(low=float(first), high=float(last))
    return Axis(low=first - 0.5, high=last + 0.5)


def _round_step(low: float, high: float, most: int) -> Decimal:
    raw = (_decimal(high) - _decimal(low)) / max(1, most - 1)
    power = Decimal(10) ** raw.adjusted()
    return next(power * step for step in _STEPS if power * step >= raw)


def _decimal(value: float) -> Decimal:
    """Take the number that a reader would write: 0.35, not the binary fraction next to it."""
    return Decimal(repr(float(value)))
