"""What a person sees of a running run: a progress bar on a terminal, else a line now and then."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from shoal.report.metrics import StepRecord, ValidationRecord
from shoal.report.number_format import count, digits, duration, percent, size
from shoal.runtime.recorder import RecordedAction
from shoal.train.journal import Listener
from shoal.train.safe_stream import printable, safe_stdout

_LINE_EVERY_S = 5.0
_BAR_WIDTH = 8


class _Display(Listener):
    """Prints notes and losses, and guesses the time that is left from the steps taken so far."""

    soft_wrap = True

    def __init__(self, console: Console, *, start_step: int, num_steps: int) -> None:
        self._console = console
        self._start_step = start_step
        self._num_steps = num_steps
        self._began_at = time.monotonic()

    def on_validation(self, record: ValidationRecord) -> None:
        """Print the loss on held-out text."""
        self.on_note(f"step {record.step}  validation loss {record.loss:.4f}")

    def on_note(self, text: str) -> None:
        """Print a line; above the bar, if there is one."""
        text = printable(text, keep="\n\t")
        self._console.print(text, markup=False, highlight=False, soft_wrap=self.soft_wrap)

    def _left(self, step: int) -> str:
        """Write how long the steps after `step` will take; nothing after the last."""
        if step == self._num_steps:
            return ""
        per_step = (time.monotonic() - self._began_at) / (step - self._start_step)
        return f"left {duration(per_step * (self._num_steps - step))}"


class ProgressBar(_Display):
    """A live bar: step, loss, tokens per second, memory per rank, time left."""

    soft_wrap = False

    def __init__(self, console: Console, *, start_step: int, num_steps: int) -> None:
        super().__init__(console, start_step=start_step, num_steps=num_steps)
        self._width_of_step = len(f"step {num_steps}/{num_steps}")
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("{task.fields[left]}"),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task(
            "", total=num_steps, completed=start_step, numbers="starting", left=""
        )
        self._progress.start()

    def on_step(self, record: StepRecord, actions: Sequence[RecordedAction]) -> None:
        """Move the bar."""
        left = self._left(record.step)
        num_gaps = 3
        room = self._console.width - self._width_of_step - _BAR_WIDTH - len(left) - num_gaps
        self._progress.update(
            self._task, completed=record.step, numbers=_numbers(record, room), left=left
        )

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._progress.stop()


class PlainLines(_Display):
    """A line every few seconds, and at the first and the last step, for logs and pipes."""

    _printed_at = -math.inf

    def on_step(self, record: StepRecord, actions: Sequence[RecordedAction]) -> None:
        """Print the step if it is time to."""
        now = time.monotonic()
        if record.step != self._num_steps and now - self._printed_at < _LINE_EVERY_S:
            return
        self._printed_at = now
        line = f"step {record.step}/{self._num_steps}  {_numbers(record)}"
        self.on_note(f"{line}  {self._left(record.step)}".rstrip())


def make_display(*, start_step: int, num_steps: int) -> ProgressBar | PlainLines:
    """Choose what suits stdout."""
    console = Console(file=safe_stdout())
    kind = ProgressBar if console.is_terminal else PlainLines
    return kind(console, start_step=start_step, num_steps=num_steps)


def _numbers(record: StepRecord, room: int | None = None) -> str:
    """Write what fits into so many columns, what matters most first; and what was recorded."""
    parts = [
        f"loss {record.loss:.4f}",
        f"{record.tokens_per_s:,.0f} tokens/s",
        f"memory {_memory(record.memory_bytes)}",
        *(
            write(value)
            for value, write in (
                (record.step_ms, lambda ms: f"{digits(ms)} ms"),
                (record.grad_norm, lambda norm: f"norm {digits(norm)}"),
                (record.lr, lambda lr: f"lr {lr:.2g}"),
                (record.tflops_per_s, lambda tflops: f"{count(tflops * 1e12)}FLOP/s a rank"),
                (record.mfu, lambda mfu: f"MFU {percent(mfu)}"),
            )
            if not math.isnan(value)
        ),
    ]
    while room is not None and parts and len("  ".join(parts)) > room:
        parts.pop()
    return "  ".join(parts)


def _memory(per_rank: Sequence[float]) -> str:
    """Name each of two ranks; of more, the least and the most."""
    if len(per_rank) <= 2:
        return " ".join(size(value) for value in per_rank)
    return f"{size(min(per_rank))} to {size(max(per_rank))} x {len(per_rank)} ranks"
