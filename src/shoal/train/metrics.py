"""`metrics.jsonl`: one line per step and per validation, continuous over resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from shoal.report.metrics import StepRecord, ValidationRecord
from shoal.runtime.events import Event


class MetricsFile:
    """Appends what happens to the file; lines after `start_step` belong to a past that is gone."""

    def __init__(self, path: Path, *, start_step: int) -> None:
        _drop_after(path, start_step)
        self._file = path.open("a", encoding="utf-8")

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
        self._file.close()

    def _write(self, kind: str, record: StepRecord | ValidationRecord) -> None:
        self._file.write(json.dumps({"kind": kind, **asdict(record)}) + "\n")
        self._file.flush()


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
