"""How a run ended, in one line: where its last step is, out of how many it was to take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.report.metrics import Metrics, StepRecord
from shoal.report.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A short text; `good` is False for a run that did not do all it was to do."""

    text: str
    good: bool


def status(run: Run) -> Status:
    """Compare the last recorded step with the steps that the config asks for."""
    steps = (run.metrics or Metrics()).steps
    wanted = run.setting("steps")
    if not isinstance(wanted, int) or isinstance(wanted, bool):
        wanted = None
    of = f" of {wanted:,}" if wanted is not None else ""
    if not steps:
        return Status(text=f"no step{of} recorded", good=False)
    last = steps[-1].step
    if wanted is None:
        # Without a config nobody knows how far the run was to go, so nothing is wrong with it.
        text, finished = f"last step {last:,}", True
    elif last < wanted:
        text, finished = f"stopped at step {last:,}{of}", False
    else:
        text, finished = f"finished, {last:,} step{'s' if last != 1 else ''}", True
    lost = _lost_since(steps)
    if lost is None:
        return Status(text=text, good=finished)
    since = f"since step {lost:,}" if lost < last else "in the last step"
    return Status(text=f"{text}; the loss is not a finite number {since}", good=False)


def _lost_since(steps: tuple[StepRecord, ...]) -> int | None:
    """Find the first of the steps without a finite loss at the end of a run, if it ends so."""
    lost = None
    for record in reversed(steps):
        if math.isfinite(record.loss):
            break
        lost = record.step
    return lost
