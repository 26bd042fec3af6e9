"""Logging to TensorBoard, for those who have it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.report.metrics import StepRecord, ValidationRecord
from shoal.runtime.events import Event

_SCALARS = (
    "loss",
    "lr",
    "grad_norm",
    "tokens_per_s",
    "step_ms",
    "compute_ms",
    "exposed_ms",
    "optimizer_ms",
)


class TensorBoard:
    """Writes every number of a step as a scalar."""

    def __init__(self, folder: Path) -> None:
        # Imported here because it is no dependency of shoal: only --tensorboard needs it.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def on_step(self, record: StepRecord, events: Sequence[Event]) -> None:
        """Log a step."""
        for name in _SCALARS:
            self._writer.add_scalar(f"train/{name}", getattr(record, name), record.step)
        for rank, memory in enumerate(record.memory_bytes):
            self._writer.add_scalar(f"memory/rank_{rank}", memory, record.step)

    def on_validation(self, record: ValidationRecord) -> None:
        """Log a validation."""
        self._writer.add_scalar("validation/loss", record.loss, record.step)

    def on_note(self, text: str) -> None:
        """Leave out what is only for people."""

    def close(self) -> None:
        """Flush and close the files."""
        self._writer.close()
