"""The page of a run: status line, headline numbers and sections, written as `report.html`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from statistics import median

from shoal.errors import UsageError
from shoal.files import replace
from shoal.report.metrics import Metrics
from shoal.report.number_format import count, digits, duration
from shoal.report.recorded_run import RecordedRun, read_recorded_run
from shoal.report.sections import Section, sections
from shoal.version import __version__

MOST_PROBLEMS = 12
"""Unreadable lines named one by one; the rest is counted."""

_MOST_PARAMETERS = 10**100
"""A number of parameters beyond it was made up."""


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run folder, and return its path."""
    run_dir = Path(run_dir)
    html = render(read_recorded_run(run_dir))
    path = run_dir / "report.html"
    write_page(path, html, instead="Make the folder writable, or copy the run to one that is")
    return path


def write_page(path: Path, html: str, *, instead: str) -> None:
    """Write a page to a file; `instead` is what to do if that cannot be."""
    try:
        # A reader who reloads meanwhile sees the old page or the new one, never half of one.
        replace(path, html.encode(errors="replace")).close()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}. {instead}") from error


def render(run: RecordedRun) -> str:
    """Make the page's HTML; everything it needs is inside it."""
    problems = list(run.problems[:MOST_PROBLEMS])
    if len(run.problems) > MOST_PROBLEMS:
        problems.append(f"… and {len(run.problems) - MOST_PROBLEMS:,} more like these")
    return render_page(
        name=run.name,
        kind="run report",
        status=status(run),
        tiles=headline(run),
        sections=sections(run),
        problems=problems,
    )


def render_page(
    *,
    name: str,
    kind: str,
    status: RunStatus,
    tiles: Sequence[Tile],
    sections: Sequence[Section],
    problems: Sequence[str] = (),
) -> str:
    """Fill the template of all pages."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_asset("page.html.jinja")).render(
        name=name,
        kind=kind,
        status=status,
        tiles=tiles,
        sections=sections,
        problems=problems,
        style=_asset("page.css"),
        script=_asset("page.js"),
        version=__version__,
    )


def _asset(name: str) -> str:
    return (files("shoal.report") / name).read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A short text; `good` is False for a run that did not do all it was to do."""

    text: str
    good: bool


def status(run: RecordedRun) -> RunStatus:
    """Compare the last recorded step with the steps that the config asks for."""
    steps = (run.metrics or Metrics()).steps
    wanted = run.setting("steps")
    if not isinstance(wanted, int) or isinstance(wanted, bool):
        wanted = None
    of = f" of {wanted:,}" if wanted is not None else ""
    if not steps:
        return RunStatus(text=f"no step{of} recorded", good=False)
    last = steps[-1].step
    if wanted is None:
        # Without a config nobody knows how far the run was to go, so nothing is wrong with it.
        text, finished = f"last step {last:,}", True
    elif last < wanted:
        text, finished = f"stopped at step {last:,}{of}", False
    else:
        text, finished = f"finished, {last:,} step{'s' if last != 1 else ''}", True
    lost = list(takewhile(lambda record: not math.isfinite(record.loss), reversed(steps)))
    if not lost:
        return RunStatus(text=text, good=finished)
    since = f"since step {lost[-1].step:,}" if len(lost) > 1 else "in the last step"
    return RunStatus(text=f"{text}; the loss is not a finite number {since}", good=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One number, what it is, and a small remark."""

    name: str
    value: str
    remark: str = ""


def headline(run: RecordedRun) -> list[Tile]:
    """Choose the tiles for which the run has something to say."""
    metrics = run.metrics or Metrics()
    tiles = [_final_loss(metrics), _validation(metrics), _speed(metrics), _parameters(run)]
    tiles += [_ranks(run, metrics), _device(run), _time(metrics)]
    return [tile for tile in tiles if tile is not None]


def _final_loss(metrics: Metrics) -> Tile | None:
    if not metrics.steps:
        return None
    first, last = metrics.steps[0], metrics.steps[-1]
    remark = f"step {last.step:,}"
    finite = [record for record in metrics.steps if math.isfinite(record.loss)]
    if finite and finite[-1] is not last:
        remark += f"; last finite {digits(finite[-1].loss, 4)} at {finite[-1].step:,}"
    elif len(metrics.steps) > 1:
        remark += f", from {digits(first.loss, 4)}"
    return Tile(name="Final loss", value=digits(last.loss, 4), remark=remark)


def _validation(metrics: Metrics) -> Tile | None:
    if not metrics.validations:
        return None
    last = metrics.validations[-1]
    finite = [record for record in metrics.validations if math.isfinite(record.loss)]
    remark = f"step {last.step:,}"
    if finite:
        best = min(finite, key=lambda record: record.loss)
        if best is not last:
            remark += f"; best {digits(best.loss, 4)} at {best.step:,}"
    return Tile(name="Validation loss", value=digits(last.loss, 4), remark=remark)


def _speed(metrics: Metrics) -> Tile | None:
    speed = finite_median(record.tokens_per_s for record in metrics.steps)
    if not math.isfinite(speed):
        return None
    step_ms = finite_median(record.step_ms for record in metrics.steps)
    remark = "median, all ranks"
    if math.isfinite(step_ms):
        remark = f"median; a step takes {duration(step_ms / 1e3)}"
    return Tile(name="Tokens per second", value=count(speed), remark=remark)


def _parameters(run: RecordedRun) -> Tile | None:
    number = run.setting("num_parameters", "parameters", "num_params")
    if not isinstance(number, int | float) or isinstance(number, bool):
        return None
    if isinstance(number, int) and abs(number) > _MOST_PARAMETERS:  # than any float
        return None
    return Tile(name="Parameters", value=count(number), remark=f"{number:,}")


def _ranks(run: RecordedRun, metrics: Metrics) -> Tile | None:
    counts = metrics.rank_counts
    if not counts:
        number = run.setting("world_size", "num_ranks", "ranks")
        if not isinstance(number, int) or isinstance(number, bool):
            return None
        counts = (number,)
    resumed = len(metrics.resumes)
    times = "once" if resumed == 1 else f"{resumed:,} times"
    return Tile(
        name="Ranks",
        value=", then ".join(f"{number:,}" for number in counts),
        remark=f"resumed {times}" if resumed else "",
    )


def _device(run: RecordedRun) -> Tile | None:
    device = run.setting("device", "device_type")
    if not isinstance(device, str):
        return None
    precision = run.setting("precision", "dtype")
    return Tile(name="Device", value=device, remark=precision if isinstance(precision, str) else "")


def _time(metrics: Metrics) -> Tile | None:
    times = [record.step_ms for record in metrics.steps if math.isfinite(record.step_ms)]
    if not times:
        return None
    remark = f"in {len(times):,} training step{'s' if len(times) != 1 else ''}"
    if math.isfinite(tokens := metrics.steps[-1].tokens):
        remark += f", {count(tokens)} tokens"
    return Tile(name="Total time", value=duration(math.fsum(times) / 1e3), remark=remark)


def finite_median(values: Iterable[float]) -> float:
    """Take the middle of the finite values; NaN when there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return median(finite) if finite else math.nan
