"""What a run remembers in its checkpoints beside the model and its optimizer: how far it came."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.checkpoint import load_training, read_manifest, save_training, step_folder
from shoal.errors import CheckpointError
from shoal.train.checkpoints import offering_older


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run has come, and on which text."""

    step: int = 0
    tokens: int = 0
    data_digest: str = ""


def read_progress(checkpoint: Path) -> Progress:
    """Read how far a checkpoint is, without its tensors; raise if it cannot be trusted."""
    with offering_older(checkpoint):
        training = read_manifest(checkpoint).extra.get("training")
    return _progress(checkpoint, training if isinstance(training, Mapping) else {})


def save_state(
    checkpoints: Path, model: nn.Module, optimizer: Optimizer, progress: Progress
) -> Path:
    """Write the checkpoint of a step and return its folder; every rank calls this."""
    folder = step_folder(checkpoints, progress.step)
    save_training(folder, model, optimizer, asdict(progress))
    return folder


def restore_state(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> Progress:
    """Fill model and optimizer from a checkpoint of any number of ranks; every rank calls this."""
    with offering_older(checkpoint):
        return _progress(checkpoint, load_training(checkpoint, model, optimizer))


def _progress(checkpoint: Path, values: Mapping[str, Any]) -> Progress:
    try:
        return Progress(
            step=int(values["step"]),
            tokens=int(values["tokens"]),
            data_digest=str(values["data_digest"]),
        )
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{checkpoint} is not a checkpoint of `shoal train`: expected step, tokens and "
            f"data_digest in it, got {dict(values)}"
        ) from None
