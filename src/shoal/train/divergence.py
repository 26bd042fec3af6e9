"""Noticing that a run has diverged, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from shoal.report.metrics import StepRecord
from shoal.train.checkpoints import step_of
from shoal.train.job import Job


def divergence(record: StepRecord, losses: Sequence[float]) -> str:
    """Tell what is not finite after a step, given every rank's loss; nothing if all is well.

    Every rank knows the same numbers, so all come to the same answer.
    """
    ranks = [str(rank) for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    if ranks:
        plural = "s" if len(ranks) > 1 else ""
        return f"step {record.step}: the loss of rank{plural} {', '.join(ranks)} is not finite"
    if not math.isfinite(record.grad_norm):
        return f"step {record.step}: the norm of the gradients is {record.grad_norm}, not finite"
    return ""


def advice_after(diverged: str, job: Job, saved: Path | None) -> str:
    """Say how to go on from the last checkpoint, or to begin again."""
    rate = job.config.optim.lr
    lower = f"--lr {float(f'{rate / 3:.1g}'):g}"  # rounded, and no 3e+02
    if saved is None:
        way = f"There is no checkpoint yet: begin again with {job.folder.flags} --overwrite {lower}"
    else:
        way = f"Go on from step {step_of(saved)} with: {job.folder.resume_command} {lower}"
    return f"{diverged}. A lower --lr than {rate:g} may help; nothing was saved.\n{way}"
