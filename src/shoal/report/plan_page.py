"""The page of `shoal plan --html`, and the trace of `--trace`: a forecast, drawn.

What a step will hold and do, moment by moment; after a search also all plans, time against memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from shoal.errors import UsageError
from shoal.files import replace
from shoal.plan import Choice, Forecast
from shoal.plan.forecast import Picture
from shoal.plan.search import Judged
from shoal.report.axis import axis_over
from shoal.report.chart import (
    Dot,
    LegendEntry,
    area_chart,
    scatter_chart,
    share_bar,
    stretches,
)
from shoal.report.number_format import count, duration, percent, size
from shoal.report.page import RunStatus, Tile, render_page, write_page
from shoal.report.sections import Section
from shoal.report.timeline import StepTimeline, draw_timeline, list_actions

GIB = 1 << 30

MOST_MOMENTS = 400
"""Drawn of a step's memory: of each stretch the fullest."""

_CSS = {
    "parameters": "compute",
    "optimizer state": "optimizer",
    "gathered parameters": "gather",
    "gradient matrices": "reduce",
    "gradients": "exposed",
    "activations": "backward",
    "inputs": "training",
    "workspaces": "other",
    "temporaries": "gradients",
}
"""The colour of each category, from the bottom up."""

_DOTS = (
    LegendEntry("does not fit", "other"),
    LegendEntry("fits", "smoothed"),
    LegendEntry("chosen", "chosen"),
)


def write_plan_page(path: Path, found: Forecast, choice: Choice | None = None) -> None:
    """Write a forecast as one file; `found` was made with its picture."""
    html = render_plan(found, choice)
    write_page(path, html, instead="Name another file with --html")


def render_plan(found: Forecast, choice: Choice | None = None) -> str:
    """Make the page's HTML; everything it needs is inside it."""
    budget = found.device_bytes if choice is None else int(choice.budget_bytes)
    whose = f"the {found.device}'s" if choice is None else "the budget of"
    fits = found.needed_bytes <= budget
    return render_page(
        name=f"{count(found.num_parameters)} parameters on {found.world_size:,} × {found.device}",
        kind="plan",
        status=RunStatus(
            text=f"{'fits into' if fits else 'does not fit into'} {whose} {size(budget)}: "
            f"{found.plan}",
            good=fits,
        ),
        tiles=_tiles(found, budget),
        sections=[
            one
            for one in (
                _memory(found),
                _categories(found),
                _schedule(found),
                _plans(choice),
                _chosen(choice),
                _rejected(choice),
                _assumptions(found),
            )
            if one is not None
        ],
    )


def _tiles(found: Forecast, budget: int) -> list[Tile]:
    memory, time = found.memory, found.time
    speed = found.num_tokens / time.step_ms * 1e3 if time.step_ms else 0.0
    exposed = time.exposed_ms / time.step_ms if time.step_ms else 0.0
    return [
        Tile(
            name="Memory needed",
            value=size(found.needed_bytes),
            remark=f"{percent(found.needed_bytes / budget)} of {size(budget)}",
        ),
        Tile(
            name="Allocated peak",
            value=size(memory.allocated_peak_bytes),
            remark=f"{size(memory.reserved_peak_bytes)} reserved",
        ),
        Tile(
            name="Step",
            value=duration(time.step_ms / 1e3),
            remark=f"forward and backward {duration(time.forward_backward_ms / 1e3)}",
        ),
        Tile(name="Tokens per second", value=count(speed), remark="all ranks"),
        Tile(
            name="Exposed communication",
            value=duration(time.exposed_ms / 1e3),
            remark=f"{percent(exposed)} of the step; network {found.network}",
        ),
    ]


def _memory(found: Forecast) -> Section:
    title = "Memory over the step"
    picture = _picture(found)
    moments = [
        max(some, key=lambda one: sum(one[1].values()))
        for some in stretches(picture.memory, MOST_MOMENTS)
    ]
    if not moments:
        return Section(title=title, missing="The step allocates nothing.")
    seen = {name for _, alive in moments for name, held in alive.items() if held}
    names = [*(name for name in _CSS if name in seen), *sorted(seen - _CSS.keys())]
    values = [[alive.get(name, 0) / GIB for name in names] for _, alive in moments]
    totals = [sum(column) for column in values]
    at = [time_us / 1e3 for time_us, _ in moments]
    peak = found.memory.peak_moment
    return Section(
        title=title,
        lead=f"What is alive, as the allocator counts it. The peak, "
        f"{size(found.memory.allocated_peak_bytes)}, comes after {peak or 'the step began'}.",
        html=area_chart(
            at,
            [LegendEntry(name, _CSS.get(name, "other")) for name in names],
            values,
            y=axis_over(totals, from_zero=True),
            x_name="time in the step, ms",
            y_name="GiB",
            summary=f"Memory over the step, {size(max(totals) * GIB)} at most",
            texts=[
                f"{duration(ms / 1e3)}: {size(total * GIB)}"
                for ms, total in zip(at, totals, strict=True)
            ],
        ),
    )


def _categories(found: Forecast) -> Section:
    held = sorted(found.memory.by_category.items(), key=lambda one: -one[1])
    total = sum(value for _, value in held) or 1
    return Section(
        title="Who is alive at the peak",
        html=share_bar(
            [LegendEntry(name, _CSS.get(name, "other")) for name, _ in held],
            [value for _, value in held],
            [f"{size(value)} · {percent(value / total)}" for _, value in held],
        )
        if held
        else "",
    )


def _schedule(found: Forecast) -> Section:
    title = "The schedule of one step"
    actions = _picture(found).actions
    if not actions:
        return Section(title=title, missing="The engine has nothing to do in a step.")
    step = StepTimeline(step=3, rank=0, actions=actions)
    waits = tuple(
        f"Compute waits {duration(one.duration_us / 1e6)} at {one.moment}."
        for one in found.time.waits[:5]
    )
    return Section(
        title=title,
        lead="The engine's own actions, at the times that the cost model gives them. Communication "
        "under compute is hidden; a wait is not.",
        html=draw_timeline(step) + list_actions(step),
        notes=waits,
    )


def _plans(choice: Choice | None) -> Section | None:
    if choice is None:
        return None
    asked = [one for one in choice.judged if one.figures is not None]
    fitting = [one for one in asked if one.fits]
    dots = [
        Dot(_gib(one), _us_per_token(one), "smoothed" if one.fits else "other", _told(one))
        for one in asked
        if one is not choice.chosen
    ]
    dots.append(
        Dot(_gib(choice.chosen), _us_per_token(choice.chosen), "chosen", str(choice.chosen))
    )
    return Section(
        title="Time against memory of all plans",
        lead=f"{len(choice.judged):,} plans: {len(fitting):,} fit into "
        f"{size(choice.budget_bytes)}, {len(choice.judged) - len(asked):,} were ruled out by "
        "others that need no more. The line joins those that no other beats in both; the broken "
        "line is the budget.",
        html=scatter_chart(
            dots,
            _DOTS,
            x=axis_over([one.x for one in dots]),
            y=axis_over([one.y for one in dots], from_zero=True),
            x_name="allocated at the peak, and CUDA's, GiB",
            y_name="µs per token of all ranks",
            summary="All plans, time against memory",
            frontier=frontier([(one.x, one.y) for one in dots]),
            limit=choice.budget_bytes / GIB,
        ),
    )


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points of which no other is lower in both, from the left."""
    kept: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not kept or y < kept[-1][1]:
            kept.append((x, y))
    return kept


def _gib(one: Judged) -> float:
    assert one.figures is not None
    return one.figures.least_bytes / GIB


def _us_per_token(one: Judged) -> float:
    return 1e6 / one.tokens_per_s


def _told(one: Judged) -> str:
    return f"{one}\nat least {_gib(one):.1f} GiB, {count(one.tokens_per_s)} tokens/s"


def _chosen(choice: Choice | None) -> Section | None:
    if choice is None:
        return None
    return Section(
        title="The chosen plan",
        lead=f"{choice.chosen}: {count(choice.chosen.tokens_per_s)} tokens/s on all ranks.",
        html=f'<pre class="sample">{escape(choice.code)}</pre>',
    )


def _rejected(choice: Choice | None) -> Section | None:
    if choice is None:
        return None
    rows = "".join(
        f'<tr><th scope="row">{escape(str(one))}</th>'
        f"<td>{escape(one.why_not or f'{count(one.tokens_per_s)} tokens/s')}</td></tr>"
        for one in sorted(choice.judged, key=lambda one: -one.tokens_per_s if one.fits else 1)
    )
    return Section(
        title="Every plan, and why not",
        html=f"<details><summary>Show {len(choice.judged):,} plans</summary>"
        f'<div class="scroll" tabindex="0"><table class="facts">{rows}</table></div></details>',
    )


def _assumptions(found: Forecast) -> Section:
    said = "".join(f"<li>{escape(one)}</li>" for one in found.assumptions)
    return Section(title="Assumptions", html=f"<ul>{said}</ul>")


def _picture(found: Forecast) -> Picture:
    if found.picture is None:
        raise UsageError("the forecast has no picture: make it with draws=True")
    return found.picture


# The trace.

_TRACKS = ("compute", "link")


def write_trace(path: Path, found: Forecast) -> None:
    """Write the step as Chrome and Perfetto read it."""
    content = json.dumps({"traceEvents": trace_events(found), "displayTimeUnit": "ms"})
    try:
        replace(path, content.encode()).close()
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}. Name another file with --trace"
        ) from error


def trace_events(found: Forecast) -> list[dict[str, Any]]:
    """Kernels and collectives by lane, the engine's actions by kind, memory as a counter."""
    picture = _picture(found)
    lanes = dict.fromkeys((*_TRACKS, *sorted({one.lane for one in picture.spans})))
    tracks = [*lanes, *dict.fromkeys(f"engine: {one.kind}" for one in picture.actions)]
    numbers = {name: number for number, name in enumerate(tracks)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": name}}
        for name, number in numbers.items()
    ]
    events += [
        {
            **{"ph": "X", "pid": 0, "tid": numbers[one.lane], "name": one.name},
            **{"ts": one.start_us, "dur": one.duration_us, "args": {"bytes": one.num_bytes}},
        }
        for one in picture.spans
    ]
    events += [
        {
            **{"ph": "X", "pid": 0, "tid": numbers[f"engine: {one.kind}"]},
            **{"name": one.unit or "root", "ts": one.start_us, "dur": one.duration_us},
            "args": {"bytes": one.num_bytes},
        }
        for one in picture.actions
    ]
    events += [
        {"ph": "C", "pid": 0, "name": "memory", "ts": at_us, "args": alive}
        for at_us, alive in picture.memory
    ]
    return events
