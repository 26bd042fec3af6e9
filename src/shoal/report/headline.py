"""The numbers at the top of the report: how the run went, in one line."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.report.metrics import Metrics
from shoal.report.run import Run
from shoal.report.series import median
from shoal.report.units import count, digits, duration

_LARGEST = 10**100
"""A number of parameters beyond it was made up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One number, what it is, and a small remark."""

    name: str
    value: str
    remark: str = ""


def headline(run: Run) -> list[Tile]:
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
    speed = median(record.tokens_per_s for record in metrics.steps)
    if not math.isfinite(speed):
        return None
    step_ms = median(record.step_ms for record in metrics.steps)
    remark = "median, all ranks"
    if math.isfinite(step_ms):
        remark = f"median; a step takes {duration(step_ms / 1e3)}"
    return Tile(name="Tokens per second", value=count(speed), remark=remark)


def _parameters(run: Run) -> Tile | None:
    number = run.setting("num_parameters", "parameters", "num_params")
    if not isinstance(number, int | float) or isinstance(number, bool):
        return None
    if isinstance(number, int) and abs(number) > _LARGEST:  # than any float
        return None
    return Tile(name="Parameters", value=count(number), remark=f"{number:,}")


def _ranks(run: Run, metrics: Metrics) -> Tile | None:
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


def _device(run: Run) -> Tile | None:
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
