"""`survive` and `resize`: the calls that an own loop makes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from shoal.errors import UsageError
from shoal.survive.run import SurvivingRun, run_of
from shoal.survive.shares import Batches
from shoal.survive.state import Stateful


def survive(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    data: Batches,
    *,
    stateful: Sequence[Stateful] = (),
    parities: int = 1,
    start: int = 0,
    snapshots: Path | str | None = None,
) -> SurvivingRun:
    """Train so that ranks may die: the others rebuild their state and go on in place.

    `data` gives global batches by number of step, the same on all ranks; each rank trains on its
    share. `stateful` is what else changes with the steps and is the same on all ranks, such as
    schedulers. With two `parities` two ranks may die at the same time. `start` says how many steps
    the model has behind it. In the folder `snapshots` checkpoints are written in the background, as
    often as the disk can take them, and a run that starts again goes on from the newest one. All
    ranks call it alike, in processes of a launcher that lets the others go on (`python -m
    shoal.survive`).
    """
    folder = None if snapshots is None else Path(snapshots)
    return SurvivingRun(model, _optimizers(optimizer), data, stateful, parities, start, folder)


def resize(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], world: int) -> None:
    """Let a model that is trained under `survive` go on over `world` ranks.

    All ranks call it alike, between or in steps, and go on meanwhile: the launcher starts processes
    or lets them go, one after another, and each comes or goes at the end of a step, with its part
    of the state of model and optimizer. A process that goes leaves its loop with `run.has_left`.
    The launcher keeps to that size: from then on it replaces ranks that die.
    """
    run = run_of(model)
    strangers = [one for one in _optimizers(optimizer) if one not in run.optimizers]
    if strangers:
        raise UsageError(
            f"resize: this {type(strangers[0]).__name__} is not among the optimizers that survive "
            "was called with, so its state could not go to other ranks"
        )
    run.resize(world)


def _optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
