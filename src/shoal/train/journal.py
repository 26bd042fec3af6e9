"""The journal: what a run says of itself while it runs, and who hears it.

Rank 0's journal has listeners (the metrics file, the display, TensorBoard, the timeline); those of
the next ranks have a timeline and the others none, so the loop does not ask which rank it is.
"""

from __future__ import annotations

import json
import math
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from shoal.checkpoint.disk import disk_errors
from shoal.errors import ShoalError
from shoal.files import is_still, replace, write_all
from shoal.report.metrics import ResumeRecord, StepRecord, ValidationRecord, read_lines
from shoal.runtime.recorder import RecordedAction

_NUM_RECENT = 9


class Listener:
    """Hears what happens in a run; a listener defines the methods that it has use for."""

    def on_step(self, record: StepRecord, actions: Sequence[RecordedAction]) -> None:
        """A step has been taken; `actions` are what rank 0's engine did in it."""

    def on_validation(self, record: ValidationRecord) -> None:
        """The loss on held-out text has been measured."""

    def on_note(self, text: str) -> None:
        """Something that a person wants to know."""

    def on_undone(self) -> None:
        """Steps may come again, with other ranks, and another journal hears of them."""

    def close(self) -> None:
        """Nothing more will happen."""


class Journal:
    """Passes on what happens to every listener."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = tuple(listeners)

    def step(self, record: StepRecord, actions: Sequence[RecordedAction]) -> None:
        """Tell that a step has been taken."""
        for listener in self._listeners:
            listener.on_step(record, actions)

    def validation(self, record: ValidationRecord) -> None:
        """Tell the loss on held-out text."""
        for listener in self._listeners:
            listener.on_validation(record)

    def note(self, text: str) -> None:
        """Tell something that a person wants to know."""
        for listener in self._listeners:
            listener.on_note(text)

    def undone(self) -> None:
        """Tell that the last steps may come again, before this journal is closed."""
        for listener in self._listeners:
            listener.on_undone()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except (OSError, ShoalError):
            if error is None:  # else the first error tells more than its echo
                raise

    def close(self) -> None:
        """Tell that nothing more will happen; once."""
        listeners, self._listeners = self._listeners, ()
        with ExitStack() as closing:
            for listener in listeners:
                closing.callback(listener.close)


class MetricsFile(Listener):
    """Appends what happens to `metrics.jsonl`: a line per step, validation and resume.

    The file is continuous over resumes; lines after `start_step` belong to a past that is gone.
    """

    def __init__(self, path: Path, *, start_step: int, num_ranks: int) -> None:
        self._path = path
        with disk_errors("write", path):
            self._file = replace(path, b"".join(_lines_up_to(start_step, path)))
        if start_step:  # only a run that goes on starts after step 0
            self._write("resume", ResumeRecord(step=start_step, num_ranks=num_ranks))

    def on_step(self, record: StepRecord, actions: Sequence[RecordedAction]) -> None:
        """Write a step."""
        self._write("step", record)

    def on_validation(self, record: ValidationRecord) -> None:
        """Write a validation."""
        self._write("validation", record)

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


class TimelineFile(Listener):
    """Remembers the last steps of a rank; at the end writes the one of median length.

    All ranks choose the same step, by what all of them reported of it. Rank 0's file is
    `timeline.json`, those of others are in `logs/`.
    """

    def __init__(self, path: Path, *, rank: int = 0, device: str = "") -> None:
        self._path = path
        self._rank = rank
        self._device = device
        self._home = path.parent.stat()
        self._recent: deque[tuple[StepRecord, Sequence[RecordedAction]]] = deque(maxlen=_NUM_RECENT)

    def on_step(self, record: StepRecord, actions: Sequence[RecordedAction]) -> None:
        """Remember a step."""
        self._recent.append((record, actions))

    def on_undone(self) -> None:
        """Forget the steps."""
        self._recent.clear()

    def close(self) -> None:
        """Write the typical one of the last steps, if there were any, and its folder is there."""
        if not self._recent or not is_still(self._path.parent, self._home):
            return
        by_length = sorted(self._recent, key=lambda entry: (sum(entry[0].own_ms), entry[0].step))
        record, actions = by_length[len(by_length) // 2]
        performed = [asdict(action) for action in actions]
        timeline = {
            "step": record.step,
            "rank": self._rank,
            "host": socket.gethostname(),
            "device": self._device,
            "actions": performed,
        }
        with disk_errors("write", self._path):
            replace(self._path, json.dumps(timeline).encode()).close()
