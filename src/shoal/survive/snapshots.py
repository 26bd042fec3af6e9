"""Snapshots: checkpoints that are written beside the training, one after another.

Parity is in memory: when more ranks die than it can rebuild, only a disk has the state. So a state
that is protected is copied and written by a thread, and when the disk has taken it on all ranks,
the one that is there then. A run that is started again goes on from the newest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shoal.checkpoint import (
    PendingSave,
    Retention,
    async_save,
    drop_unfinished,
    latest,
    load_training,
    step_folder,
    training_state,
)
from shoal.checkpoint.manifest import check_json
from shoal.errors import UsageError
from shoal.survive.state import Stateful, TrainingState

_NUM_KEPT = 2


class Snapshots:
    """The snapshots of one run in a folder; the methods but `is_writing` are collective."""

    def __init__(self, folder: Path, state: TrainingState) -> None:
        if len(state.optimizers) != 1:
            raise UsageError(
                f"snapshots need one optimizer, got {len(state.optimizers)}: save checkpoints in "
                "the loop instead, after run.protect()"
            )
        self._folder = folder
        self._state = state
        self._pending: PendingSave[Any] | None = None
        self._is_broken = False
        self.num_written = 0
        """How many were published."""
        check_json(_values(state.stateful), "the state of what is stateful")

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes."""
        return self._pending is not None and not self._pending.done

    def load(self) -> int | None:
        """Go on from the newest; returns its version, or None where there is none."""
        newest: list[Any] = [latest(self._folder) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(newest, src=0)
        if newest[0] is None:
            return None
        (optimizer,) = self._state.optimizers
        extra = load_training(newest[0], self._state.model, optimizer)
        version, values = extra["version"], extra["stateful"]
        assert isinstance(version, int)
        assert isinstance(values, list)
        for one, value in zip(self._state.stateful, values, strict=True):
            assert isinstance(value, dict)
            one.load_state_dict(value)
        return version

    def start(self, version: int) -> None:
        """Copy the state, which nobody changes meanwhile, and begin to write it."""
        self.finish()
        leads = dist.get_rank() == 0
        if self._is_broken:
            if leads:
                drop_unfinished(self._folder)
            self._is_broken = False
        self._folder.mkdir(parents=True, exist_ok=True)
        extra = {"version": version, "stateful": _values(self._state.stateful)}
        (optimizer,) = self._state.optimizers
        tensors, values = training_state(self._state.model, optimizer, extra)
        self._pending = async_save(step_folder(self._folder, version), tensors, values)

    def finish(self) -> None:
        """Wait until the last one is published; raises if it could not be written."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.wait()
        self.num_written += 1
        if dist.get_rank() == 0:
            Retention(last=_NUM_KEPT).apply(self._folder)

    def give_up(self) -> None:
        """A rank is gone that may have been writing; not collective."""
        self._is_broken = True
        self._pending = None


def _values(stateful: Sequence[Stateful]) -> list[Any]:
    return [one.state_dict() for one in stateful]
