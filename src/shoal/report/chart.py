"""Charts over the steps of a run, as HTML around a small inline SVG.

The SVG holds only shapes and stretches with the page; strokes keep their width because they do
not scale, and all text is HTML placed by percentage, so it stays readable at any page width.

    .y-name   what the y axis measures, where the card's title does not say it
    .frame    .y-ticks | .plot (svg, and what hover adds)
                       | .x-ticks
                       | .x-name
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, groupby
from operator import attrgetter
from typing import NamedTuple, TypeVar

from shoal.report.axis import Axis, Tick, step_axis
from shoal.report.number_format import digits

T = TypeVar("T")

SCALE = 1000
"""Length of either side of the SVG's own coordinates; large enough to round to whole numbers."""

MOST_POINTS = 900
"""Points drawn per line: more would be finer than the pixels of a wide screen."""

FLAG_WIDTH = 0.18
"""The share of the plot's width kept free for a flag's word: one short word on a phone."""

WIDEST_BAR = 0.08
"""The most of the plot's width that one bar takes."""


class Point(NamedTuple):
    """One value at a step; NaN is a gap."""

    step: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A series in a line chart; `css` names its colour, `dots` draws points without a line."""

    name: str
    css: str
    points: Sequence[Point]
    dots: bool = False


class LegendEntry(NamedTuple):
    """A series or part, and the class of the style sheet that colours it."""

    name: str
    css: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar: the steps it stands for, and the mean time of each part of them."""

    first: int
    last: int
    parts_ms: tuple[float, ...]


def line_chart(
    lines: Sequence[Line], *, y: Axis, y_name: str = "", summary: str, resumes: Sequence[int] = ()
) -> str:
    """Draw lines and dots over the steps, a flag at each resume behind them; NaN is a gap."""
    steps = [point.step for line in lines for point in line.points]
    x = step_axis(min(steps), max(steps))
    flags = "".join(f"M{_place(x.at(step))} 0V{SCALE}" for step in resumes)
    shapes = f'<path class="flag" d="{flags}"/>' if flags else ""
    shapes += "".join(_shape(line, x, y) for line in lines)
    names = [LegendEntry(line.name, line.css) for line in lines]
    marks, words = _line_marks(lines, x), _flag_words(resumes, x)
    return _figure(names, shapes, marks, x=x, y=y, y_name=y_name, summary=summary, words=words)


def step_time_chart(bars: Sequence[Bar], parts: Sequence[LegendEntry], y: Axis) -> str:
    """Draw the time of steps as stacked bars; one that is too high for the axis is cut."""
    x = step_axis(bars[0].first, bars[-1].last)
    if bars[0].first < bars[-1].last:
        x = Axis(low=x.low - 0.5, high=x.high + 0.5)
    shapes = "".join(_bar(bar, parts, x, y) for bar in bars)
    marks = _bar_marks(bars, x)
    y_name, summary = "time of a step, ms", "Step time in parts"
    return _figure(parts, shapes, marks, x=x, y=y, y_name=y_name, summary=summary)


def area_chart(
    at: Sequence[float],
    parts: Sequence[LegendEntry],
    values: Sequence[Sequence[float]],
    *,
    y: Axis,
    x_name: str,
    y_name: str,
    summary: str,
    texts: Sequence[str],
) -> str:
    """Draw parts stacked on each other over places that only rise; each place has its text."""
    x = Axis(low=at[0], high=max(at[-1], at[0] + 1e-9))
    tops = [list(accumulate(column)) for column in values]
    bottom = [0.0] * len(at)
    shapes = ""
    for index, part in enumerate(parts):
        top = [column[index] for column in tops]
        line = [f"{_place(x.at(a))} {_place(1 - y.at(v))}" for a, v in zip(at, top, strict=True)]
        back = [f"{_place(x.at(a))} {_place(1 - y.at(v))}" for a, v in zip(at, bottom, strict=True)]
        shapes += f'<path class="area {part.css}" d="M{"L".join([*line, *reversed(back)])}Z"/>'
        bottom = top
    marks: list[Mark] = [
        (round(x.at(a), 4), text, [digits(value) if value else None for value in column])
        for a, text, column in zip(at, texts, values, strict=True)
    ]
    names = {"x_name": x_name, "y_name": y_name, "summary": summary}
    return _figure(parts, shapes, marks, x=x, y=y, **names)


class Dot(NamedTuple):
    """A point of a scatter plot: where, in which colour, and its text."""

    x: float
    y: float
    css: str
    text: str


def scatter_chart(
    dots: Sequence[Dot],
    parts: Sequence[LegendEntry],
    *,
    x: Axis,
    y: Axis,
    x_name: str,
    y_name: str,
    summary: str,
    frontier: Sequence[tuple[float, float]] = (),
    limit: float,
) -> str:
    """Draw dots, those of later parts over those of earlier ones, and a line through some.

    A broken line stands at the limit of x, if that is in the picture.
    """
    is_seen = x.low < limit < x.high
    shapes = f'<path class="flag" d="M{_place(x.at(limit))} 0V{SCALE}"/>' if is_seen else ""
    if len(frontier) > 1:
        places = [f"{_place(x.at(a))} {_place(1 - y.at(b))}" for a, b in frontier]
        shapes += f'<path class="line training" d="M{"L".join(places)}"/>'
    for part in parts:
        places = [
            f"M{_place(x.at(one.x))} {_place(1 - y.at(one.y))}h0"
            for one in dots
            if one.css == part.css
        ]
        shapes += f'<path class="dots {part.css}" d="{"".join(places)}"/>'
    marks: list[Mark] = [
        (round(x.at(one.x), 4), one.text, [None] * len(parts))
        for one in sorted(dots, key=attrgetter("x"))
    ]
    names = {"x_name": x_name, "y_name": y_name, "summary": summary}
    return _figure(parts, shapes, marks, x=x, y=y, **names)


def legend(parts: Sequence[LegendEntry], values: Sequence[str] | None = None) -> str:
    """Name the colours, each with a value beside it when there are some."""
    texts = [""] * len(parts) if values is None else values
    items = "".join(
        f'<li><i class="key {part.css}"></i>{escape(part.name)}'
        + (f" <b>{escape(text)}</b>" if text else "")
        + "</li>"
        for part, text in zip(parts, texts, strict=True)
    )
    return f'<ul class="legend">{items}</ul>'


def share_bar(parts: Sequence[LegendEntry], values: Sequence[float], labels: Sequence[str]) -> str:
    """Draw one full-width bar cut into shares, and name them below it."""
    total = math.fsum(values)
    pieces = "".join(
        f'<i class="{part.css}" style="width:{value / total * 100:.3f}%"></i>'
        for part, value in zip(parts, values, strict=True)
        if value > 0
    )
    return f'<div class="shares">{pieces}</div>{legend(parts, labels)}'


def _shape(line: Line, x: Axis, y: Axis) -> str:
    """Join neighbouring points; a dot is a round stroke of no length, which never stretches."""
    joined, alone = "", ""
    points = line.points if line.dots else thin(line.points, MOST_POINTS)
    for is_finite, stretch in groupby(points, lambda point: math.isfinite(point.value)):
        places = [f"{_place(x.at(step))} {_place(1 - y.at(value))}" for step, value in stretch]
        if is_finite and (line.dots or len(places) == 1):
            alone += "".join(f"M{place}h0" for place in places)
        elif is_finite:
            joined += f"M{places[0]}L{' '.join(places[1:])}"
    lines = f'<path class="line {line.css}" d="{joined}"/>' if joined else ""
    dots = f'<path class="dots {line.css}" d="{alone}"/>' if alone else ""
    return lines + dots


def _flag_words(resumes: Sequence[int], x: Axis) -> str:
    """Place the words right of their lines, or left where the plot ends; none over another."""
    words: list[str] = []
    free = 0.0
    for at in map(x.at, sorted(resumes)):
        left = at if at + FLAG_WIDTH <= 1 else at - FLAG_WIDTH
        if left < free:
            continue
        free = left + FLAG_WIDTH
        side = "" if left == at else " before"
        words.append(f'<span class="flag-word{side}" style="left:{at * 100:.2f}%">resumed</span>')
    return "".join(words)


def _bar(bar: Bar, parts: Sequence[LegendEntry], x: Axis, y: Axis) -> str:
    left, right = x.at(bar.first - 0.5), x.at(bar.last + 0.5)
    # A gap between bars; and a run of few steps does not get bars as wide as a hand.
    inset = max((right - left) * 0.08, (right - left - WIDEST_BAR) / 2)
    shapes: list[str] = []
    base = 0.0
    for part, value in zip(parts, bar.parts_ms, strict=True):
        if not value > 0:
            continue
        box = _box(left + inset, right - inset, y.at(base), y.at(base + value))
        shapes.append(f'<rect class="{part.css}" {box}/>')
        base += value
    if base > y.high:
        shapes.append(f'<rect class="cut" {_box(left, right, 0.955, 0.97)}/>')
    return "".join(shapes)


def _box(left: float, right: float, low: float, high: float) -> str:
    return (
        f'x="{_place(left)}" y="{_place(1 - high)}" '
        f'width="{_place(right - left)}" height="{_place(high - low)}"'
    )


def _place(share: float) -> str:
    return f"{share * SCALE:.1f}".removesuffix(".0")


Mark = tuple[float, str, list[str | None]]
"""Where hover finds something, its title, and a text for each series or None."""


def _line_marks(lines: Sequence[Line], x: Axis) -> list[Mark]:
    drawn = {
        point.step
        for line in lines
        for point in (line.points if line.dots else thin(line.points, MOST_POINTS // 2))
    }
    values = [dict(line.points) for line in lines]
    return [
        (
            round(x.at(step), 4),
            f"step {step:,}",
            [digits(table[step], 4) if step in table else None for table in values],
        )
        for step in sorted(drawn)
    ]


def _bar_marks(bars: Sequence[Bar], x: Axis) -> list[Mark]:
    return [
        (
            round(x.at((bar.first + bar.last) / 2), 4),
            f"step {bar.first:,}"
            if bar.first == bar.last
            else f"mean of steps {bar.first:,}–{bar.last:,}",
            [f"{digits(ms)} ms" if math.isfinite(ms) else None for ms in bar.parts_ms],
        )
        for bar in bars
    ]


def _figure(
    parts: Sequence[LegendEntry],
    shapes: str,
    marks: list[Mark],
    *,
    x: Axis,
    y: Axis,
    y_name: str,
    summary: str,
    words: str = "",
    x_name: str = "step",
) -> str:
    content = {
        "names": [part.name for part in parts],
        "css": [part.css for part in parts],
        "marks": marks,
    }
    # A script element ends at the first "</script", wherever it stands.
    hover = json.dumps(content, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    y_ticks = y.ticks(7)
    grid = "".join(f"M0 {_place(1 - tick.at)}H{SCALE}" for tick in y_ticks)
    widest = max((tick.label for tick in y_ticks), key=len, default="")
    beside = "".join(
        f'<span style="top:{100 - tick.at * 100:.2f}%">{tick.label}</span>' for tick in y_ticks
    )
    return (
        f'<figure class="chart">{legend(parts) if len(parts) > 1 else ""}'
        + (f'<div class="y-name">{escape(y_name)}</div>' if y_name else "")
        + '<div class="frame">'
        f'<div class="y-ticks"><span class="sizer">{widest}</span>{beside}</div>'
        f'<div class="plot"><svg viewBox="0 0 {SCALE} {SCALE}" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(summary)}">'
        f'<path class="grid" d="{grid}"/>{shapes}</svg>{words}</div>'
        f"{below(x.ticks(7, whole=x_name == 'step'), x_name)}"
        f'</div><script type="application/json">{hover}</script></figure>'
    )


def below(ticks: Sequence[Tick], name: str) -> str:
    """Write the labels of an x axis, and what it measures."""
    labels = "".join(
        f'<span style="left:{tick.at * 100:.2f}%">{tick.label}</span>' for tick in ticks
    )
    return f'<div class="x-ticks">{labels}</div><div class="x-name">{name}</div>'


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """Keep at most about `limit` points: the lowest and highest of each stretch, and each gap.

    Taking every n-th point would lose the spikes that a reader is looking for.
    """
    if len(points) <= limit:
        return list(points)
    kept: list[Point] = []
    for stretch in stretches(points, max(1, limit // 3)):
        finite = [point for point in stretch if math.isfinite(point.value)]
        gaps = [point for point in stretch if not math.isfinite(point.value)]
        ends = [pick(finite, key=attrgetter("value")) for pick in (min, max) if finite]
        kept += sorted({*ends, *gaps[:1]}, key=attrgetter("step"))
    return kept


def smooth(points: Sequence[Point]) -> list[Point]:
    """Average over the neighbours on both sides, a twentieth of the run in all; gaps stay gaps.

    The window is centred and shrinks towards the ends, so the curve neither lags nor drifts there.
    """
    finite = [math.isfinite(value) for _, value in points]
    values = (value if math.isfinite(value) else 0.0 for _, value in points)
    sums, numbers = list(accumulate(values, initial=0.0)), list(accumulate(finite, initial=0))

    def mean_around(index: int) -> float:
        side = min(len(points) // 40, index, len(points) - 1 - index)
        low, high = index - side, index + side + 1
        return (sums[high] - sums[low]) / (numbers[high] - numbers[low])

    return [
        Point(point.step, mean_around(index) if finite[index] else math.nan)
        for index, point in enumerate(points)
    ]


def stretches(items: Sequence[T], number: int) -> Iterator[Sequence[T]]:
    """Cut a sequence into at most `number` stretches whose lengths differ by at most one."""
    number = min(number, len(items))
    for index in range(number):
        yield items[len(items) * index // number : len(items) * (index + 1) // number]
