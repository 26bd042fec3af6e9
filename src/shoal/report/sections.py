"""The parts of the report below the headline: from a run's numbers to drawings and remarks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

from shoal.report.axis import Axis, axis_over
from shoal.report.chart import (
    Bar,
    LegendEntry,
    Line,
    Point,
    line_chart,
    share_bar,
    smooth,
    step_time_chart,
    stretches,
)
from shoal.report.metrics import Metrics, ResumeRecord, StepRecord
from shoal.report.number_format import digits, duration, percent, size
from shoal.report.overlap import overlapped_share
from shoal.report.recorded_run import RecordedRun
from shoal.report.throughput import throughput
from shoal.report.timeline import draw_timeline, list_actions
from shoal.runtime.recorder import RecordedAction
from shoal.step.action import ActionKind

MOST_BARS = 60
"""Bars in the step-time chart; each stands for the mean of its steps."""

FEW_STEPS = 40
"""Fewer steps than this are drawn as they are, without a smoothed line."""

FEW_STEADY = 4
"""With fewer steady steps than this, the mean is that of all steps."""

MOST_RANKS = 16
"""Ranks drawn in the memory section."""

FAR_OFF = 0.1
"""A forecast that is further off than this part of what was measured is said to be so."""

_TIME_PARTS = (
    LegendEntry("compute", "compute"),
    LegendEntry("exposed communication", "exposed"),
    LegendEntry("optimizer", "optimizer"),
    LegendEntry("other", "other"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One card: a title, a sentence, safe HTML, remarks; or what is missing for it."""

    title: str
    lead: str = ""
    html: str = ""
    missing: str = ""
    notes: tuple[str, ...] = ()
    half: bool = False


def sections(run: RecordedRun) -> list[Section]:
    """Make every section, in the order of the page."""
    metrics = run.metrics or Metrics()
    return [
        _loss(metrics),
        _small(metrics, "Learning rate", "lr"),
        _small(metrics, "Gradient norm", "grad_norm"),
        _step_time(metrics),
        _memory(metrics),
        *_foreseen(run, metrics),
        _schedule(run),
        _sample(run),
        _facts(run, metrics),
        _config(run),
    ]


def _loss(metrics: Metrics) -> Section:
    title = "Loss"
    if not metrics.steps:
        return Section(title=title, missing="No training step was recorded in metrics.jsonl.")
    training = [Point(record.step, record.loss) for record in metrics.steps]
    validation = [Point(record.step, record.loss) for record in metrics.validations]
    notes = (*_gap_note(training, "training"), *_gap_note(validation, "validation"))
    if not any(math.isfinite(point.value) for point in training + validation):
        return Section(title=title, missing="No step has a finite loss.", notes=notes)
    if len(training) < FEW_STEPS:
        lines = [Line(name="training", css="smoothed", points=training)]
    else:
        lines = [
            Line(name="training", css="training", points=training),
            Line(name="training, smoothed", css="smoothed", points=smooth(training)),
        ]
    if validation:
        lines.append(Line(name="validation", css="validation", points=validation, dots=True))
    y = axis_over([point.value for line in lines for point in line.points])
    last = training[-1]
    summary = f"Loss over {len(training):,} steps, {digits(last.value, 4)} at step {last.step:,}"
    return Section(
        title=title,
        html=line_chart(
            lines,
            y=y,
            y_name="nats per token",
            summary=summary,
            resumes=[record.step for record in metrics.resumes],
        ),
        notes=notes,
    )


def _gap_note(points: list[Point], what: str) -> tuple[str, ...]:
    steps = [point.step for point in points if not math.isfinite(point.value)]
    if not steps:
        return ()
    shown = ", ".join(f"{step:,}" for step in steps[:5]) + (", …" if len(steps) > 5 else "")
    number = "1 step" if len(steps) == 1 else f"{len(steps):,} steps"
    return (
        f"The {what} loss of {number} is not a finite number "
        f"(step {shown}); the curve has a gap there.",
    )


def _small(metrics: Metrics, title: str, field: str) -> Section:
    name = title.lower()
    points = [Point(record.step, getattr(record, field)) for record in metrics.steps]
    finite = [point.value for point in points if math.isfinite(point.value)]
    if not finite:
        return Section(title=title, missing=f"No {name} was recorded.", half=True)
    # A norm that spans decades would be a flat line with one spike on a linear axis.
    wide = min(finite) > 0 and max(finite) / min(finite) > 1000 and field == "grad_norm"
    return Section(
        title=title,
        html=line_chart(
            [Line(name=name, css="smoothed", points=points)],
            y=axis_over(finite, from_zero=True, log=wide),
            y_name="logarithmic" if wide else "",
            summary=f"{title} over {len(points):,} steps, "
            f"between {digits(min(finite))} and {digits(max(finite))}",
        ),
        half=True,
    )


def _step_time(metrics: Metrics) -> Section:
    title = "Where the step's time goes"
    timed = [record for record in metrics.steps if math.isfinite(record.compute_ms)]
    if not timed:
        return Section(title=title, missing="The time of the steps was not recorded in parts.")
    bars = [
        Bar(first=stretch[0].step, last=stretch[-1].step, parts_ms=_split(stretch))
        for stretch in stretches(timed, MOST_BARS)
    ]
    steady = _steady(timed, metrics.resumes)
    means_ms = _split(steady)
    kept = [index for index, mean_ms in enumerate(means_ms) if mean_ms > 0] or [0]
    y, notes = _time_axis(bars, timed)
    total_ms = math.fsum(means_ms[index] for index in kept)
    parts = [_TIME_PARTS[index] for index in kept]
    bars = [replace(bar, parts_ms=tuple(bar.parts_ms[index] for index in kept)) for bar in bars]
    after = ""
    if len(steady) < len(timed):
        after = " after the first"
        if metrics.resumes:
            after = ", without the first and the first after each resume"
    shares = ""
    if total_ms:
        values = [means_ms[index] for index in kept]
        labels = [f"{duration(ms / 1e3)} · {percent(ms / total_ms)}" for ms in values]
        shares = share_bar(parts, values, labels)
    return Section(
        title=title,
        lead=f"Mean of {len(steady):,} step{'s' if len(steady) != 1 else ''}{after}: "
        f"{duration(total_ms / 1e3)}. Exposed communication is time in which compute stood still.",
        html=shares + step_time_chart(bars, parts, y),
        notes=notes,
    )


def _steady(timed: Sequence[StepRecord], resumes: Sequence[ResumeRecord]) -> Sequence[StepRecord]:
    """Leave out the steps that allocate, compile and warm up: the first, also after a resume."""
    starts = [0, *(record.step + 1 for record in resumes)]
    warming = {
        next((record.step for record in timed if record.step >= start), None) for start in starts
    }
    steady = [record for record in timed if record.step not in warming]
    # Of a few steps the mean would be that of one or two.
    return steady if len(steady) >= FEW_STEADY else timed


def _split(records: Sequence[StepRecord]) -> tuple[float, float, float, float]:
    """Average the parts; what the step took beyond them is other: data, logging, the host."""
    compute, exposed, optimizer = (
        _or_zero(finite_mean(getattr(record, field) for record in records))
        for field in ("compute_ms", "exposed_ms", "optimizer_ms")
    )
    known = compute + exposed + optimizer
    rest = finite_mean(record.step_ms for record in records) - known
    # Below one part in a hundred it is rounding between clocks, not a part of its own.
    return compute, exposed, optimizer, rest if rest > 0.01 * known else 0.0


def _time_axis(bars: Sequence[Bar], timed: Sequence[StepRecord]) -> tuple[Axis, tuple[str, ...]]:
    """Make the axis for the usual steps; say how high those go that it cuts."""
    totals = sorted(math.fsum(bar.parts_ms) for bar in bars)
    usual = totals[int(0.9 * (len(totals) - 1))]
    if not 0 < usual * 2.5 < totals[-1]:
        return axis_over(totals, from_zero=True), ()
    slowest = max(timed, key=lambda record: math.fsum(_split([record])))
    note = (
        f"Bars with a notch go beyond the axis; the slowest step, {slowest.step:,}, "
        f"took {duration(math.fsum(_split([slowest])) / 1e3)}."
    )
    return Axis(low=0.0, high=usual * 1.4), (note,)


def _memory(metrics: Metrics) -> Section:
    title = "Memory per rank"
    # Each number once: ranks times steps would be without bound in a file of somebody else.
    peaks = [-math.inf] * metrics.num_ranks
    for record in metrics.steps:
        for rank, value in enumerate(record.memory_bytes):
            peaks[rank] = max(peaks[rank], _or_zero(value))
    top = max(peaks, default=0.0)
    if top <= 0:
        return Section(title=title, missing="No rank reported its memory.")
    ranks = sorted(range(len(peaks)), key=lambda rank: -peaks[rank])[:MOST_RANKS]
    rows = "".join(
        f'<tr><th scope="row">rank {rank}</th><td><i class="compute" '
        f'style="width:{peaks[rank] / top * 100:.2f}%"></i></td><td>{size(peaks[rank])}</td></tr>'
        for rank in sorted(ranks)
    )
    lead = "The highest value that each rank reported during the run."
    if len(peaks) > MOST_RANKS:
        lead += (
            f" The {MOST_RANKS} highest of {len(peaks):,} ranks; the lowest has {size(min(peaks))}."
        )
    return Section(title=title, lead=lead, html=f'<table class="bars">{rows}</table>')


def _foreseen(run: RecordedRun, metrics: Metrics) -> list[Section]:
    """What was forecast, beside what was measured; nothing if there was no forecast."""
    title = "Forecast and measured"
    if run.forecast is None:
        return []
    why_not = run.forecast.get("why_not")
    if isinstance(why_not, str):
        return [Section(title=title, missing=f"There is no forecast: {why_not}")]
    said = {group: run.forecast.get(group) for group in ("memory", "time")}
    memory, time = (one if isinstance(one, dict) else {} for one in said.values())
    steady = _steady(metrics.steps, metrics.resumes)
    is_cpu = run.forecast.get("device") == "cpu"
    held = max((max(one.memory_bytes, default=math.nan) for one in steady), default=math.nan)
    step, half = _number(time.get("step_ms")), _number(time.get("forward_backward_ms"))
    exposed = _number(time.get("exposed_ms"))
    pairs = [
        ("allocated peak", _number(memory.get("allocated_peak_bytes")), held),
        ("step", step, finite_mean(one.step_ms for one in steady)),
        ("compute", half - exposed, finite_mean(one.compute_ms for one in steady)),
        ("exposed communication", exposed, finite_mean(one.exposed_ms for one in steady)),
        ("optimizer", step - half, finite_mean(one.optimizer_ms for one in steady)),
    ]
    rows, notes = "", []
    for name, forecast, measured in pairs:
        is_size = name == "allocated peak"
        texts = [
            (size(one) if is_size else duration(one / 1e3)) if math.isfinite(one) else ""
            for one in (forecast, measured)
        ]
        off = forecast / measured - 1 if measured and math.isfinite(measured) else math.nan
        cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
        rows += (
            f'<tr><th scope="row">{name}</th>{cells}'
            f"<td>{f'{off:+.1%}' if math.isfinite(off) else ''}</td></tr>"
        )
        # On a CPU a rank reports the memory of its process, interpreter and libraries included.
        if abs(off) > FAR_OFF and not (is_size and is_cpu):
            notes.append(f"The forecast of {name} was off by {off:+.0%}: {', '.join(texts)}.")
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("forecast", "measured", "off"))
    return [
        Section(
            title=title,
            lead=f"As `shoal plan` saw the run before it began. At the peak: {_categories(memory)}."
            + (" Ranks on CPUs report the memory of the whole process." if is_cpu else ""),
            html=f'<table class="facts"><thead><tr><th></th>{heads}</tr></thead>'
            f"<tbody>{rows}</tbody></table>",
            notes=tuple(notes),
        )
    ]


def _categories(memory: dict[str, object]) -> str:
    held = memory.get("by_category")
    named = held.items() if isinstance(held, dict) else ()
    sizes = [(str(name), _number(value)) for name, value in named]
    told = [f"{name} {size(value)}" for name, value in sorted(sizes, key=lambda one: -one[1])]
    return ", ".join(told) or "not known"


def _number(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e18 else math.nan  # pyright: ignore


def _schedule(run: RecordedRun) -> Section:
    title = "The schedule of one step"
    if run.timeline is None or not run.timeline.actions:
        return Section(
            title=title,
            missing="No actions of a step were recorded: there is no readable timeline.json.",
        )
    actions = run.timeline.actions
    return Section(
        title=title,
        lead=f"Step {run.timeline.step:,} as rank {run.timeline.rank} ran it"
        f"{_moved(actions)}.{_hidden(actions)} "
        "Communication under compute is hidden; a wait is not. "
        "A unit's name stands where it fits; point at a bar, tap it, or go to it by the arrow "
        "keys, to read it.",
        html=draw_timeline(run.timeline) + list_actions(run.timeline) + _other_ranks(run),
        notes=_why_empty(run, actions),
    )


def _hidden(actions: Sequence[RecordedAction]) -> str:
    """Tell which part of the time of gathers and reductions lay under compute."""
    shares = {
        name: overlapped_share(actions, kind)
        for name, kind in (("gathers", ActionKind.GATHER), ("reductions", ActionKind.REDUCE))
    }
    told = [f"{percent(share)} of {name}" for name, share in shares.items() if share is not None]
    return f" Overlapped with compute: {', '.join(told)}." if told else ""


def _other_ranks(run: RecordedRun) -> str:
    return "".join(
        f"<details><summary>Show rank {other.rank}{_at(other.host)}."
        f"{escape(_hidden(other.actions))}</summary>"
        f"{draw_timeline(other)}</details>"
        for other in run.other_timelines
    )


def _at(host: str) -> str:
    return f" on {escape(host)}" if host else ""


def _why_empty(run: RecordedRun, actions: Sequence[RecordedAction]) -> tuple[str, ...]:
    """Say why there are no gathers, where somebody would look for them."""
    if any(action.kind in (ActionKind.GATHER, ActionKind.REDUCE) for action in actions):
        return ()
    if run.setting("compile") in ("graph", "inductor"):
        return (
            "The model was compiled: gathers and reductions are nodes of its graphs, which run "
            "without the engine, so their lanes are empty. torch.profiler shows them.",
        )
    return ("No gather or reduction was recorded: one rank has nothing to communicate.",)


def _moved(actions: Iterable[RecordedAction]) -> str:
    """Tell how many bytes the step gathered, reduced and freed, as far as it was recorded."""
    totals: dict[str, int] = {}
    for action in actions:
        if action.num_bytes:
            totals[action.kind] = totals.get(action.kind, 0) + action.num_bytes
    told = [
        f"{kind} {size(totals[kind])}"
        for kind in (*(ActionKind.GATHER, ActionKind.REDUCE), *sorted(totals))
        if kind in totals
    ]
    return f": {', '.join(dict.fromkeys(told))}" if told else ""


def _sample(run: RecordedRun) -> Section:
    title = "Generated sample"
    if not run.sample:
        return Section(title=title, missing="No text was generated: there is no sample.txt.")
    return Section(title=title, html=f'<pre class="sample">{escape(run.sample)}</pre>')


def _facts(run: RecordedRun, metrics: Metrics) -> Section:
    """Where, when and by which command; how fast."""
    title = "This run"
    names = {
        "started": "Started",
        "command": "Command",
        "host": "Host",
        "torch": "torch",
        "shoal": "shoal",
    }
    rows = {
        shown: value
        for name, shown in names.items()
        if isinstance(value := run.setting(name), str) and value
    }
    if run.timeline is not None and run.timeline.device:
        rows["Device"] = run.timeline.device
    steady = _steady(metrics.steps, metrics.resumes)
    speed = throughput(run, finite_mean(record.tokens_per_s for record in steady))
    if speed is not None:
        known = "not known: the peak of this device and precision is not in the table"
        rows["TFLOP/s per rank"] = digits(speed.tflops_per_s)
        rows["MFU"] = known if speed.mfu is None else percent(speed.mfu)
    if not rows:
        return Section(title=title, missing="config.json does not say when and where it ran.")
    cells = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in rows.items()
    )
    return Section(title=title, html=f'<table class="facts">{cells}</table>')


def _config(run: RecordedRun) -> Section:
    title = "Resolved config"
    if run.config is None:
        return Section(title=title, missing="There is no readable config.json.")
    text = json.dumps(run.config, indent=2, ensure_ascii=False)
    return Section(
        title=title,
        html=f"<details><summary>Show the config</summary><pre>{escape(text)}</pre></details>",
    )


def _or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def finite_mean(values: Iterable[float]) -> float:
    """Average the finite values; NaN when there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan
