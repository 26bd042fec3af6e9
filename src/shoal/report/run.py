"""A run folder read as a whole; what is missing or unreadable becomes a note, not a failure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import UsageError
from shoal.files import read_regular
from shoal.report.metrics import Metrics, read_metrics
from shoal.report.timeline import Timeline, read_timeline

_MOST_BYTES = 1 << 23
"""Of a config or a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run left behind; None stands for a file that is missing or unreadable."""

    name: str
    config: dict[str, object] | None
    metrics: Metrics | None
    timeline: Timeline | None
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


def read_run(folder: Path) -> Run:
    """Read a run folder; raises UsageError when it is not one."""
    if not folder.is_dir():
        state = "is not a folder" if folder.exists() else "does not exist"
        raise UsageError(f"{folder} {state}. Give the folder of a run, such as runs/demo")
    if not any((folder / name).is_file() for name in ("config.json", "metrics.jsonl")):
        raise UsageError(
            f"{folder} is not the folder of a run: it holds neither config.json nor metrics.jsonl. "
            "`shoal train` makes such folders under runs/"
        )
    reader = _Reader(folder)
    config, sample, timeline = reader.config(), reader.sample(), reader.timeline()
    # Last, because its many lines may have many problems, and the first few are shown.
    metrics = reader.metrics()
    return Run(
        name=folder.resolve().name,
        config=config,
        metrics=metrics,
        timeline=timeline,
        sample=sample,
        problems=tuple(reader.problems),
    )


class _Reader:
    """Reads one file after the other and collects what was wrong with them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.problems: list[str] = []

    def config(self) -> dict[str, object] | None:
        path = self._existing("config.json")
        if path is None:
            return None
        try:
            content = json.loads(read_regular(path, _MOST_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            return self._unreadable(path, error)
        if not isinstance(content, dict):
            return self._unreadable(path, ValueError("expected an object"))
        return content

    def metrics(self) -> Metrics | None:
        path = self._existing("metrics.jsonl")
        if path is None:
            return None
        try:
            metrics = read_metrics(path)
        except OSError as error:
            return self._unreadable(path, error)
        self.problems.extend(metrics.problems)
        return metrics

    def timeline(self) -> Timeline | None:
        path = self._existing("timeline.json")
        if path is None:
            return None
        try:
            timeline, problems = read_timeline(path)
        except (OSError, ValueError, RecursionError) as error:
            return self._unreadable(path, error)
        self.problems.extend(problems)
        return timeline

    def sample(self) -> str | None:
        path = self._existing("sample.txt")
        if path is None:
            return None
        try:
            return read_regular(path, _MOST_BYTES).decode(errors="replace")
        except OSError as error:
            return self._unreadable(path, error)

    def _existing(self, name: str) -> Path | None:
        path = self._folder / name
        return path if path.exists() else None

    def _unreadable(self, path: Path, error: Exception) -> None:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        self.problems.append(f"{path.name} cannot be read: {reason}")
