"""The step gate: the ranks report to each other, and all decide alike whether a step counts.

    forward, backward, clipping      every rank on its own share of the batch     step.py
    exchange of rank reports         one row of numbers per rank, all read the same table
    gate                             the optimizer acts, or the step is skipped, or the run stops

Apart from parameters, gradients and their norm a step exchanges nothing else, so the reports carry
all that the ranks have to agree on: requests to stop, the save in flight, a lost run folder.
"""

from __future__ import annotations

import math
import resource
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

import torch

from shoal.train.checkpoints import CheckpointSaver, step_of
from shoal.train.job import TrainJob
from shoal.train.optimizer import LossScale
from shoal.train.step import StepAttempt
from shoal.train.world import World
from shoal.watch import compare_collectives, digest_of_collectives

MOST_SKIPPED = 50
"""A run that skips so many steps in a row has diverged, and is stopped."""

_NUM_COMPARED_STEPS = 10
_SLOW_FACTOR = 1.5
_LEAST_SLOW_MS = 5.0
"""Less than this is noise, whatever the factor."""


class RankReport(NamedTuple):
    """The numbers that one rank reports of a step before the optimizer acts."""

    loss: float
    own_ms: float
    """Time of the step so far that was not spent waiting for others."""
    memory_bytes: float
    stop: float
    """Not 0 if this rank was asked to stop."""
    save_status: float
    collectives: float
    """Digest of the collectives of the step so far."""
    folder_lost: float = 0
    """Not 0 if rank 0 finds the run folder removed or replaced."""


class StepGate:
    """Exchanges the ranks' reports of each step, and decides by them whether the step counts.

    After a step `reports` holds those of all ranks, in rank order, `notes` what a person wants to
    know of it, and `diverged` why the run has to stop, if it has to; `scale` is what the next
    step's loss is multiplied by.
    """

    def __init__(
        self,
        world: World,
        on_nonfinite: Literal["stop", "skip", "ignore"],
        stop_requested: Callable[[], bool],
        saver: CheckpointSaver,
        scale: LossScale,
    ) -> None:
        self.reports: list[RankReport] = []
        self.notes: tuple[str, ...] = ()
        self.diverged = ""
        self.scale = scale
        self._world = world
        self._on_nonfinite = on_nonfinite
        self._stop_requested = stop_requested
        self._saver = saver
        self._num_skipped = 0

    def admits(self, step: int, attempt: StepAttempt) -> bool:
        """Tell whether the optimizer may act on an attempt, the same on all ranks; collective."""
        rows = self._world.gather([float(value) for value in self._report(attempt)])
        self.reports = [RankReport(*row) for row in rows.tolist()]
        if len({report.collectives for report in self.reports}) > 1:
            compare_collectives()
        self.notes = ()
        found = nonfinite(step, self.reports, attempt.grad_norm)
        if found and not _nonfinite_ranks(self.reports) and self.scale.can_shrink:
            self.scale = self.scale.shrunk()
            self.notes = (f"{found}; skipped, losses are scaled by {self.scale.factor:g} now",)
            return False
        if not found or self._on_nonfinite == "ignore":
            self._num_skipped = 0
            self.scale = self.scale.grown()
            return True
        self._num_skipped += 1
        if self._on_nonfinite == "stop":
            self.diverged = found
        elif self._num_skipped >= MOST_SKIPPED:
            self.diverged = f"{found}, as in the {MOST_SKIPPED - 1} steps before it"
        else:
            self.notes = (f"{found}; the step is skipped on all ranks",)
        return False

    def _report(self, attempt: StepAttempt) -> RankReport:
        return RankReport(
            loss=attempt.loss,
            own_ms=attempt.own_ms,
            memory_bytes=memory_bytes(self._world.device),
            stop=self._stop_requested(),
            save_status=self._saver.status,
            collectives=digest_of_collectives(),
            folder_lost=self._saver.folder_lost,
        )


def nonfinite(step: int, reports: Sequence[RankReport], grad_norm: float) -> str:
    """Tell what is not finite before a step changes anything; nothing if all is well."""
    ranks = _nonfinite_ranks(reports)
    if ranks:
        plural = "s" if len(ranks) > 1 else ""
        return f"step {step}: the loss of rank{plural} {', '.join(ranks)} is not finite"
    if not math.isfinite(grad_norm):
        return f"step {step}: the norm of the gradients is {grad_norm}, not finite"
    return ""


def _nonfinite_ranks(reports: Sequence[RankReport]) -> list[str]:
    return [str(rank) for rank, report in enumerate(reports) if not math.isfinite(report.loss)]


def divergence_advice(diverged: str, job: TrainJob, saved: Path | None) -> str:
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


class Stragglers:
    """Names slow ranks: compares the ranks' own time, without waits, over the last steps.

    A slow rank makes all others wait, so their step takes as long as its own; what they did
    themselves does not.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[float, ...]] = deque(maxlen=_NUM_COMPARED_STEPS)

    def notes(self, step: int, reports: Sequence[RankReport]) -> list[str]:
        """Name the ranks that were slow in the last steps, once for each such stretch."""
        self._recent.append(tuple(report.own_ms for report in reports))
        if step % _NUM_COMPARED_STEPS or len(self._recent) < _NUM_COMPARED_STEPS:
            return []
        typical = [median(times) for times in zip(*self._recent, strict=True)]
        usual = median(typical)
        return [
            f"step {step}: rank {rank} holds the others up: {own:.0f} ms of its own per step, "
            f"where {usual:.0f} ms are usual"
            for rank, own in enumerate(typical)
            if own > _SLOW_FACTOR * usual and own > usual + _LEAST_SLOW_MS
        ]


def memory_bytes(device: torch.device) -> int:
    """Return the peak allocated on a CUDA device, or this process's memory on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    pages = Path("/proc/self/statm")
    if pages.exists():
        return int(pages.read_text().split()[1]) * resource.getpagesize()
    # Elsewhere the peak will do. macOS counts it in bytes, others in KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
