"""`metrics.jsonl`: one line per step, validation and resume, continuous over resumes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from shoal.checkpoint.disk import disk_errors
from shoal.files import replace, write_all
from shoal.report.metrics import ResumeRecord, StepRecord, ValidationRecord, read_lines
from shoal.runtime.events import Event


class MetricsFile:
    """Appends what happens to the file; lines after `start_step` belong to a past that is gone."""

    def __init__(self, path: Path, *, start_step: int, num_ranks: int) -> None:
        self._path = path
        with disk_errors("write", path):
            self._file = replace(path, b"".join(_lines_up_to(start_step, path)))
        if start_step:  # only a run that goes on starts after step 0
            self._write("resume", ResumeRecord(step=start_step, num_ranks=num_ranks))

    def on_step(self, record: StepRecord, events: Sequence[Event]) -> None:
        """Write a step."""
        self._write("step", record)

    def on_validation(self, record: ValidationRecord) -> None:
        """Write a validation."""
        self._write("validation", record)

    def on_note(self, text: str) -> None:
        """Leave out what is only for people."""

    def close(self) -> None:
        """Close the file."""
        with disk_errors("write", self._path):
            self._file.close()

    def _write(self, kind: str, record: StepRecord | ValidationRecord | ResumeRecord) -> None:
        fields = {name: _strict(value) for name, value in asdict(record).items()}
        line = json.dumps({"kind": kind, **fields}, allow_nan=False)
        with disk_errors("write", self._path):
            write_all(self._file, f"{line}\n".encode())


def _strict(value: object) -> object:
    """Replace what JSON has no word for: NaN and infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines_up_to(last: int, path: Path) -> Iterator[bytes]:
    """Yield the lines up to a step; one that was cut off in a crash, or holds no step, goes."""
    if not path.exists():
        return
    for line in read_lines(path):
        try:
            step = json.loads(line)["step"]
            is_kept = isinstance(step, int) and step <= last
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if is_kept:
            yield line.rstrip(b"\r\n") + b"\n"
