"""`timeline.json`: what rank 0's engine did in one step that is late and typical."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from shoal.checkpoint.disk import disk_errors
from shoal.files import is_still, replace
from shoal.report.metrics import StepRecord, ValidationRecord
from shoal.runtime.events import Event

_NUM_RECENT = 9


class TimelineFile:
    """Remembers the last steps and writes the one of median length at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._home = path.parent.stat()
        self._recent: deque[tuple[StepRecord, Sequence[Event]]] = deque(maxlen=_NUM_RECENT)

    def on_step(self, record: StepRecord, events: Sequence[Event]) -> None:
        """Remember a step."""
        self._recent.append((record, events))

    def on_validation(self, record: ValidationRecord) -> None:
        """Leave out validations: only training steps are drawn."""

    def on_note(self, text: str) -> None:
        """Leave out what is only for people."""

    def close(self) -> None:
        """Write the typical one of the last steps, if there were any, and its folder is there."""
        if not self._recent or not is_still(self._path.parent, self._home):
            return
        by_length = sorted(self._recent, key=lambda entry: entry[0].step_ms)
        record, events = by_length[len(by_length) // 2]
        timeline = {
            "step": record.step,
            "rank": 0,
            "events": [asdict(event) for event in events],
        }
        with disk_errors("write", self._path):
            replace(self._path, json.dumps(timeline).encode()).close()
