"""Saving while training goes on: one checkpoint in flight, and nothing lost if it fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import NoReturn

from torch import nn
from torch.optim import Optimizer

from shoal.checkpoint import PendingSave, Retention, point_latest
from shoal.comm.observer import waiting
from shoal.errors import CheckpointError
from shoal.train.job import Job
from shoal.train.state import Progress, start_saving
from shoal.train.told import Told
from shoal.train.world import World

_POLL_S = 0.005


class SaveStatus(IntEnum):
    """What a rank knows of the save in flight."""

    NONE = 0
    RUNNING = 1
    DONE = 2
    FAILED = 3


class Saver:
    """Writes a run's checkpoints in the background, keeps those that shall stay.

    `saved` is the newest checkpoint that is known to be whole.
    """

    def __init__(self, job: Job, world: World) -> None:
        self.saved = job.checkpoint
        self._job = job
        self._leads = world.leads
        # Of rank 0: hosts may see the folder each under a number of its own.
        self._home = job.folder.path.stat() if world.leads else None
        self._retention = Retention(last=job.config.run.keep_last, every=job.config.run.keep_every)
        self._pending: PendingSave | None = None

    @property
    def folder_lost(self) -> bool:
        """Whether rank 0 finds that the run folder was removed or replaced."""
        return self._home is not None and self._job.folder.is_lost(self._home)

    def give_up(self) -> NoReturn:
        """Raise on all ranks, which know of it, that the run folder is gone."""
        if self._home is not None:
            self._job.folder.drop_remains(self._home)
        raise self._job.folder.lost_error()

    @property
    def status(self) -> SaveStatus:
        """What this rank has to tell the others in this step."""
        if self._pending is None:
            return SaveStatus.NONE
        if not self._pending.done:
            return SaveStatus.RUNNING
        try:
            self._pending.check()
        except CheckpointError:
            return SaveStatus.FAILED
        return SaveStatus.DONE

    def follow(self, told: Told) -> None:
        """Conclude a save that all ranks have finished, raise one that failed; collective.

        All ranks hear of a failure in the same step, so all raise in it.
        """
        statuses = set(told.save_statuses)
        if SaveStatus.FAILED in statuses or statuses == {SaveStatus.DONE}:
            self.finish()

    def start(self, model: nn.Module, optimizer: Optimizer, progress: Progress) -> None:
        """Begin to save a step; waits for the save before it. Collective."""
        self.finish()
        job = self._job
        checkpoints = job.folder.checkpoints
        with self._noticing_loss(), waiting("all ranks to begin a save"):
            self._pending = start_saving(checkpoints, model, optimizer, progress, job.config)

    def finish(self) -> Path | None:
        """Wait for the save in flight, if there is one, and return `saved`; collective."""
        pending, self._pending = self._pending, None
        if pending is not None:
            while not pending.done:  # a slow disk is no rank that stays away
                time.sleep(_POLL_S)
            with self._noticing_loss(), waiting("all ranks to end a save"):
                self.saved = pending.wait()
            if self._leads:
                self._tidy(self.saved.parent)
        return self.saved

    def _tidy(self, checkpoints: Path) -> None:
        """Remove what need not stay, and point to the newest; rank 0 does this."""
        try:
            self._retention.apply(checkpoints)
            point_latest(checkpoints)
        except (CheckpointError, OSError):
            # Of a lost folder all ranks hear in the next step: one that left now would be missed.
            if not self.folder_lost:
                raise

    @contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        """Say of a save that failed because the run folder was removed that it was."""
        try:
            yield
        except CheckpointError as error:
            folder = self._job.folder
            if folder.config.exists():
                raise
            raise folder.lost_error() from error
