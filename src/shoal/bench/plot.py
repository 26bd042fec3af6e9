"""Panels of lines side by side as one SVG file, for pages: text and all, no style sheet, no script.

`shoal.report.chart` draws for a page that brings its own styles. A page in a repository has only
the picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from shoal.report.axis import Axis, axis_over

WIDTH, HEIGHT = 300, 200
"""Of the plot of one panel, in pixels."""
LEFT, ABOVE, BELOW, GAP = 56, 54, 46, 24
COLORS = ("#6b7280", "#0f766e", "#2563eb", "#c2410c", "#7c3aed")
"""Of the lines, in their order; the same name has the same colour in all panels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Lines over one axis that they share."""

    title: str
    x_name: str
    y_name: str
    lines: dict[str, Sequence[tuple[float, float]]]
    log_x: bool = False
    """For values that double from point to point."""
    note: str = ""
    """One line under the axis."""


def svg(panels: Sequence[Panel]) -> str:
    """The panels beside each other, under one legend."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    color = {name: COLORS[index % len(COLORS)] for index, name in enumerate(names)}
    width = (LEFT + WIDTH + GAP) * len(panels)
    height = ABOVE + HEIGHT + BELOW + 18
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" fill="#1f2937">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *_legend(color),
    ]
    for index, panel in enumerate(panels):
        parts.append(f'<g transform="translate({(LEFT + WIDTH + GAP) * index + LEFT},{ABOVE})">')
        parts += [*_panel(panel, color), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(color: dict[str, str]) -> list[str]:
    lines: list[str] = []
    at = LEFT
    for name, one in color.items():
        lines.append(f'<rect x="{at}" y="10" width="14" height="4" fill="{one}"/>')
        lines.append(_text(name, at + 20, 17))
        at += 40 + 7 * len(name)
    return lines


def _panel(panel: Panel, color: dict[str, str]) -> list[str]:
    points = [point for line in panel.lines.values() for point in line]
    xs = [x for x, _ in points]
    x = Axis(low=min(xs) if panel.log_x else 0.0, high=max(xs), log=panel.log_x)
    y = axis_over([value for _, value in points], from_zero=True)
    lines = [_text(panel.title, 0, -18, weight="bold"), _text(panel.y_name, 0, -4, size=10)]
    for tick in y.ticks(6):
        at = _number(HEIGHT * (1 - tick.at))
        lines.append(f'<path d="M0 {at}H{WIDTH}" stroke="#e5e7eb"/>')
        lines.append(_text(tick.label, -6, HEIGHT * (1 - tick.at) + 4, anchor="end"))
    for tick in x.ticks(6, whole=True):
        lines.append(_text(tick.label, WIDTH * tick.at, HEIGHT + 16, anchor="middle"))
    lines.append(_text(panel.x_name, WIDTH, HEIGHT + 32, anchor="end"))
    if panel.note:
        lines.append(_text(panel.note, 0, HEIGHT + 50, size=11))
    for name, line in panel.lines.items():
        places = [(_number(WIDTH * x.at(a)), _number(HEIGHT * (1 - y.at(b)))) for a, b in line]
        path = "L".join(f"{a} {b}" for a, b in places)
        stroke = f'fill="none" stroke="{color[name]}" stroke-width="2"'
        lines.append(f'<path d="M{path}" {stroke}/>')
        lines += [f'<circle cx="{a}" cy="{b}" r="3" fill="{color[name]}"/>' for a, b in places]
    return lines


def _text(
    text: str, x: float, y: float, *, anchor: str = "start", size: int = 12, weight: str = "normal"
) -> str:
    place = f'x="{_number(x)}" y="{_number(y)}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" font-weight="{weight}">{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
