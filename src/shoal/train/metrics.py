"""`metrics.jsonl`: one line per step, validation and resume, continuous over resumes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from shoal.checkpoint.disk import disk_errors
from shoal.report.metrics import ResumeRecord, StepRecord, ValidationRecord
from shoal.runtime.events import Event


class MetricsFile:
    """Appends what happens to the file; lines after `start_step` belong to a past that is gone."""

    def __init__(self, path: Path, *, start_step: int, num_ranks: int) -> None:
        self._path = path
        with disk_errors("write", path):
            _drop_after(path, start_step)
            self._file = path.open("a", encoding="utf-8")
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
            self._file.write(line + "\n")
            self._file.flush()


def _strict(value: object) -> object:
    """Replace what JSON has no word for: NaN and infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drop_after(path: Path, step: int) -> None:
    """Keep the lines up to a step; a line that was cut off in a crash goes too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    part = path.with_suffix(".part")
    part.write_text("".join(kept), encoding="utf-8")
    os.replace(part, path)
