"""Noticing numbers that are not finite, and what to do about them.

Every rank knows the same numbers, so all come to the same answer.
"""

from __future__ import annotations

import math
from pathlib import Path

from shoal.train.checkpoints import step_of
from shoal.train.job import Job
from shoal.train.told import Told

PATIENCE = 50
"""A run that skips so many steps in a row has diverged, and is stopped."""


def nonfinite(step: int, told: Told, grad_norm: float) -> str:
    """Tell what is not finite before a step changes anything; nothing if all is well."""
    ranks = [str(rank) for rank in told.lost]
    if ranks:
        plural = "s" if len(ranks) > 1 else ""
        return f"step {step}: the loss of rank{plural} {', '.join(ranks)} is not finite"
    if not math.isfinite(grad_norm):
        return f"step {step}: the norm of the gradients is {grad_norm}, not finite"
    return ""


def advice_after(diverged: str, job: Job, saved: Path | None) -> str:
    """Say how to go on from the last checkpoint, or to begin again."""
    rate = job.config.optim.lr
    lower = f"--lr {float(f'{rate / 3:.1g}'):g}"  # rounded, and no 3e+02
    if saved is None:
        way = f"There is no checkpoint yet: begin again with {job.folder.flags} --overwrite {lower}"
    else:
        way = f"Go on from step {step_of(saved)} with: {job.folder.resume_command} {lower}"
    return (
        f"{diverged}. A lower --lr than {rate:g} may help, or --on-nonfinite skip; nothing was "
        f"saved.\n{way}"
    )
