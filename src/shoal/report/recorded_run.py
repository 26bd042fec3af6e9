"""A run folder read as a whole; what is missing or unreadable becomes a note, not a failure."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shoal.errors import UsageError
from shoal.files import read_regular
from shoal.report.metrics import Metrics, read_metrics
from shoal.report.timeline import StepTimeline, read_timeline

T = TypeVar("T")

_MOST_BYTES = 1 << 23
"""Of a config or a sample."""

MOST_OTHERS = 7
"""Other ranks whose step is shown, the first ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The files of a run, read; None stands for a file that is missing or unreadable."""

    name: str
    config: dict[str, object] | None
    metrics: Metrics | None
    timeline: StepTimeline | None
    other_timelines: tuple[StepTimeline, ...] = ()
    """What other ranks did in the same step, by rank."""
    forecast: dict[str, object] | None = None
    """What was said of the run before it began."""
    sample: str | None
    problems: tuple[str, ...]

    def setting(self, *names: str) -> object:
        """Find the first of these names in the config, at any depth, the outermost first."""
        level: list[dict[str, object]] = [self.config or {}]
        while level:
            for name in names:
                for table in level:
                    if table.get(name) is not None:
                        return table[name]
            level = [
                value for table in level for value in table.values() if isinstance(value, dict)
            ]
        return None


def read_recorded_run(folder: Path) -> RecordedRun:
    """Read a run folder; raises UsageError when it is not one."""
    if not folder.is_dir():
        state = "is not a folder" if folder.exists() else "does not exist"
        raise UsageError(f"{folder} {state}. Give the folder of a run, such as runs/demo")
    if not any((folder / name).is_file() for name in ("config.json", "metrics.jsonl")):
        raise UsageError(
            f"{folder} is not the folder of a run: it holds neither config.json nor metrics.jsonl. "
            "`shoal train` makes such folders under runs/"
        )
    problems: list[str] = []

    def read(name: str, parse: Callable[[Path], T]) -> T | None:
        path = folder / name
        if not path.exists():
            return None
        try:
            return parse(path)
        except (OSError, ValueError, RecursionError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            problems.append(f"{name} cannot be read: {reason}")
            return None

    config = read("config.json", _read_config)
    forecast = read("forecast.json", _read_config)
    sample = read("sample.txt", _read_sample)
    timeline, unread_spans = read("timeline.json", read_timeline) or (None, [])
    problems += unread_spans
    others: list[StepTimeline] = []
    for rank in range(1, MOST_OTHERS + 1) if timeline is not None else ():
        other, unread = read(f"logs/timeline-rank-{rank}.json", read_timeline) or (None, [])
        problems += unread
        # A file of another step is of an earlier run, on more ranks.
        if other is not None and timeline is not None and other.step == timeline.step:
            others += [other] if other.actions and other.rank == rank else []
    # Last, because its many lines may have many problems, and the first few are shown.
    metrics = read("metrics.jsonl", read_metrics)
    problems += metrics.problems if metrics is not None else ()
    return RecordedRun(
        name=folder.resolve().name,
        config=config,
        metrics=metrics,
        timeline=timeline,
        other_timelines=tuple(others),
        forecast=forecast,
        sample=sample,
        problems=tuple(problems),
    )


def _read_config(path: Path) -> dict[str, object]:
    content = json.loads(read_regular(path, _MOST_BYTES))
    if not isinstance(content, dict):
        raise ValueError("expected an object")
    return content


def _read_sample(path: Path) -> str:
    return read_regular(path, _MOST_BYTES).decode(errors="replace")
