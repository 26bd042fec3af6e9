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
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median
from typing import Literal

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank reports of a step before the optimizer acts."""

    loss: float
    own_ms: float
    """Time of the step so far that was not spent waiting for others."""
    memory_bytes: float
    stop: bool
    """Whether this rank was asked to stop."""
    save_status: int
    collectives: int
    """Digest of the collectives of the step so far."""
    folder_lost: bool = False
    """Whether rank 0 finds the run folder removed or replaced."""

    @classmethod
    def from_row(cls, row: torch.Tensor) -> RankReport:
        """Read back the numbers that a rank sent."""
        loss, own_ms, memory_bytes, stop, save_status, collectives, folder_lost = row.tolist()
        return cls(
            loss=loss,
            own_ms=own_ms,
            memory_bytes=memory_bytes,
            stop=bool(stop),
            save_status=int(save_status),
            collectives=int(collectives),
            folder_lost=bool(folder_lost),
        )


@dataclass(frozen=True, slots=True)
class StepExchange:
    """The reports of all ranks, in rank order."""

    reports: tuple[RankReport, ...]

    @classmethod
    def gather(cls, world: World, report: RankReport) -> StepExchange:
        """Send this rank's report, and receive those of all; collective."""
        rows = world.gather([float(value) for value in astuple(report)])
        return cls(tuple(RankReport.from_row(row) for row in rows))

    @property
    def loss(self) -> float:
        """The mean loss of all ranks, whose shares of the batch are equal."""
        losses = [report.loss for report in self.reports]
        return torch.tensor(losses, dtype=torch.float64).mean().item()

    @property
    def nonfinite_ranks(self) -> tuple[int, ...]:
        """The ranks whose loss is not finite."""
        return tuple(
            rank for rank, report in enumerate(self.reports) if not math.isfinite(report.loss)
        )

    @property
    def stopping(self) -> bool:
        """Whether any rank was asked to stop."""
        return any(report.stop for report in self.reports)

    @property
    def folder_lost(self) -> bool:
        """Whether the run folder is gone: so all ranks raise it, and none waits for rank 0."""
        return any(report.folder_lost for report in self.reports)

    @property
    def save_statuses(self) -> set[int]:
        """What the ranks know of the save in flight."""
        return {report.save_status for report in self.reports}

    @property
    def communicated_alike(self) -> bool:
        """Whether all ranks took part in the same collectives in the same order."""
        return len({report.collectives for report in self.reports}) == 1


class StepGate:
    """Exchanges the ranks' reports of each step, and decides by them whether the step counts.

    After a step `exchange` holds the reports, `notes` what a person wants to know of it, and
    `diverged` why the run has to stop, if it has to; `scale` is what the next step's loss is
    multiplied by.
    """

    exchange: StepExchange

    def __init__(
        self,
        world: World,
        on_nonfinite: Literal["stop", "skip", "ignore"],
        stop_requested: Callable[[], bool],
        saver: CheckpointSaver,
        scale: LossScale,
    ) -> None:
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
        self.exchange = StepExchange.gather(self._world, self._report(attempt))
        if not self.exchange.communicated_alike:
            compare_collectives()
        self.notes = ()
        found = nonfinite(step, self.exchange, attempt.grad_norm)
        if found and not self.exchange.nonfinite_ranks and self.scale.can_shrink:
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


def nonfinite(step: int, exchange: StepExchange, grad_norm: float) -> str:
    """Tell what is not finite before a step changes anything; nothing if all is well."""
    ranks = [str(rank) for rank in exchange.nonfinite_ranks]
    if ranks:
        plural = "s" if len(ranks) > 1 else ""
        return f"step {step}: the loss of rank{plural} {', '.join(ranks)} is not finite"
    if not math.isfinite(grad_norm):
        return f"step {step}: the norm of the gradients is {grad_norm}, not finite"
    return ""


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

    def notes(self, step: int, exchange: StepExchange) -> list[str]:
        """Name the ranks that were slow in the last steps, once for each such stretch."""
        self._recent.append(tuple(report.own_ms for report in exchange.reports))
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
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    # Elsewhere the peak will do. macOS counts it in bytes, others in KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
