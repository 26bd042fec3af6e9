"""What a person sees of a running run: a progress bar on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from shoal.report.metrics import StepRecord, ValidationRecord
from shoal.report.units import duration, size
from shoal.runtime.events import Event

_LINE_EVERY_S = 5.0


class ProgressBar:
    """A live bar: step, loss, tokens per second, memory per rank, time left."""

    def __init__(self, console: Console, *, start_step: int, num_steps: int) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task(
            "", total=num_steps, completed=start_step, numbers="starting"
        )
        self._progress.start()

    def on_step(self, record: StepRecord, events: Sequence[Event]) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=record.step, numbers=_numbers(record))

    def on_validation(self, record: ValidationRecord) -> None:
        """Print the loss above the bar."""
        self.on_note(_validation(record))

    def on_note(self, text: str) -> None:
        """Print above the bar."""
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._progress.stop()


class PlainLines:
    """A line every few seconds, and at the first and the last step, for logs and pipes."""

    def __init__(self, console: Console, *, start_step: int, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._first_step = start_step + 1
        self._began_at = time.monotonic()
        self._printed_at = self._began_at

    def on_step(self, record: StepRecord, events: Sequence[Event]) -> None:
        """Print the step if it is time to."""
        now = time.monotonic()
        ends = record.step in (self._first_step, self._num_steps)
        if not ends and now - self._printed_at < _LINE_EVERY_S:
            return
        self._printed_at = now
        per_step = (now - self._began_at) / (record.step - self._first_step + 1)
        num_left = self._num_steps - record.step
        left = f"  left {duration(per_step * num_left)}" if num_left else ""
        self.on_note(f"step {record.step}/{self._num_steps}  {_numbers(record)}{left}")

    def on_validation(self, record: ValidationRecord) -> None:
        """Print the loss on held-out text."""
        self.on_note(_validation(record))

    def on_note(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing is open."""


def make_display(*, start_step: int, num_steps: int) -> ProgressBar | PlainLines:
    """Choose what suits stdout."""
    console = Console()
    kind = ProgressBar if console.is_terminal else PlainLines
    return kind(console, start_step=start_step, num_steps=num_steps)


def _numbers(record: StepRecord) -> str:
    speed = f"{record.tokens_per_s:,.0f} tokens/s"
    return f"loss {record.loss:.4f}  {speed}  {_memory(record.memory_bytes)}"


def _memory(per_rank: Sequence[float]) -> str:
    """Name each of two ranks; of more, the least and the most."""
    if len(per_rank) <= 2:
        return " ".join(size(value) for value in per_rank)
    return f"{size(min(per_rank))} to {size(max(per_rank))} x {len(per_rank)} ranks"


def _validation(record: ValidationRecord) -> str:
    return f"step {record.step}  validation loss {record.loss:.4f}"
