"""Loggers that others know: TensorBoard, Weights & Biases. Each is imported when a run asks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.report.metrics import NUMBERS, StepRecord, ValidationRecord
from shoal.runtime.recorder import RecordedAction
from shoal.train.journal import Listener

_NUMBERS = ("loss", *(name for name in NUMBERS if name != "tokens"))


def scalars(record: StepRecord) -> Iterator[tuple[str, float]]:
    """Every number of a step, by the name under which it is logged."""
    for name in _NUMBERS:
        value = getattr(record, name)
        if name == "loss" or not math.isnan(value):
            yield f"train/{name}", value
    for rank, memory in enumerate(record.memory_bytes):
        yield f"memory/rank_{rank}", memory


class TensorBoard(Listener):
    """Writes every number of a step as a scalar of TensorBoard, for those who have it."""

    def __init__(self, folder: Path) -> None:
        # Imported here because it is no dependency of shoal: only --tensorboard needs it.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def on_step(self, record: StepRecord, actions: Sequence[RecordedAction]) -> None:
        """Log a step."""
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, record.step)

    def on_validation(self, record: ValidationRecord) -> None:
        """Log a validation."""
        self._writer.add_scalar("validation/loss", record.loss, record.step)

    def close(self) -> None:
        """Flush and close the files."""
        self._writer.close()


class WeightsAndBiases(Listener):
    """Logs a run to Weights & Biases, under its own name; a resumed run goes on there.

    Project, entity and mode are what wandb finds in its own settings and variables.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        folder.mkdir(exist_ok=True)
        self._run: Any = wandb.init(
            name=folder.parent.name,
            dir=str(folder),
            config=dict(config),
        )

    def on_step(self, record: StepRecord, actions: Sequence[RecordedAction]) -> None:
        """Log a step."""
        self._run.log(dict(scalars(record)), step=record.step)

    def on_validation(self, record: ValidationRecord) -> None:
        """Log a validation."""
        self._run.log({"validation/loss": record.loss}, step=record.step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()
