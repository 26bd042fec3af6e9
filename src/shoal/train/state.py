"""What a run remembers in its checkpoints beside the model and its optimizer: how far it came."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from reprlib import repr as short
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.checkpoint import (
    PendingSave,
    async_save,
    load_training,
    read_manifest,
    step_folder,
    training_state,
)
from shoal.checkpoint.manifest import NAME
from shoal.errors import CheckpointError
from shoal.train.checkpoints import offering_older
from shoal.train.config import TrainConfig
from shoal.train.options import from_json, to_json
from shoal.train.scale import LossScale


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run has come, and on which text."""

    step: int = 0
    samples: int = 0
    """How many samples all ranks together have seen: the position in the data."""
    tokens: int = 0
    data_digest: str = ""
    scale: LossScale = field(default_factory=LossScale)
    """What the next step's loss is multiplied by."""

    def after(self, config: TrainConfig, data_digest: str, scale: LossScale) -> Progress:
        """How far it is one step later."""
        batch_size = config.run.batch_size
        return Progress(
            step=self.step + 1,
            samples=self.samples + batch_size,
            tokens=self.tokens + batch_size * config.model.context,
            data_digest=data_digest,
            scale=scale,
        )


def read_progress(checkpoint: Path) -> Progress:
    """Read how far a checkpoint is, without its tensors; raise if it cannot be trusted."""
    with offering_older(checkpoint):
        training = read_manifest(checkpoint).extra.get("training")
    return _progress(checkpoint, training if isinstance(training, Mapping) else {})


def read_saved_config(checkpoint: Path) -> TrainConfig:
    """Read the config that a checkpoint was saved with."""
    with offering_older(checkpoint):
        training = read_manifest(checkpoint).extra.get("training")
    tree = training.get("config") if isinstance(training, Mapping) else None
    return from_json(TrainConfig, tree, where=checkpoint / NAME)


def start_saving(
    checkpoints: Path,
    model: nn.Module,
    optimizer: Optimizer,
    progress: Progress,
    config: TrainConfig,
) -> PendingSave:
    """Copy the state of a step, and write its checkpoint while training goes on; collective."""
    extra = {**asdict(progress), "config": to_json(config)}
    tensors, values = training_state(model, optimizer, extra)
    # A run folder that was removed meanwhile is not made anew.
    return async_save(step_folder(checkpoints, progress.step), tensors, values, parents=False)


def restore_state(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> Progress:
    """Fill model and optimizer from a checkpoint of any number of ranks; every rank calls this."""
    with offering_older(checkpoint):
        return _progress(checkpoint, load_training(checkpoint, model, optimizer))


def _count(value: object) -> int:
    """Check a number that a manifest holds, which may come from anywhere."""
    if not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"expected a count, got {short(value)}")
    return value


def _progress(checkpoint: Path, values: Mapping[str, Any]) -> Progress:
    try:
        return Progress(
            step=_count(values["step"]),
            samples=_count(values["samples"]),
            tokens=_count(values["tokens"]),
            data_digest=str(values["data_digest"]),
            scale=LossScale(**values["scale"]),
        )
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{checkpoint} is not a checkpoint of `shoal train`: expected step, samples, tokens, "
            f"data_digest and scale in it, got {sorted(values)}"
        ) from None
