"""The checkpoints of a run: what is in them, which are whole, and saving while training goes on.

Beside the model and its optimizer a checkpoint holds how far the run came (`RunProgress`) and its
config.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from reprlib import repr as short
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from shoal.checkpoint import (
    PendingSave,
    Retention,
    async_save,
    drop_unfinished,
    latest,
    load_training,
    point_latest,
    read_manifest,
    step_folder,
    training_state,
)
from shoal.checkpoint.manifest import NAME
from shoal.comm.observer import waiting
from shoal.errors import CheckpointError
from shoal.files import remove_folder
from shoal.train.config import TrainConfig
from shoal.train.optimizer import LossScale
from shoal.train.options import from_json, to_json
from shoal.train.run_folder import RunFolder
from shoal.train.world import World

_DAMAGED = "damaged-"
_POLL_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """How far a run has come, and on which text."""

    step: int = 0
    samples: int = 0
    """How many samples all ranks together have seen: the position in the data."""
    tokens: int = 0
    data_digest: str = ""
    scale: LossScale = field(default_factory=LossScale)
    """The factor of the next step's loss."""

    def after(self, config: TrainConfig, data_digest: str, scale: LossScale) -> RunProgress:
        """How far it is one step later."""
        batch_size = config.run.batch_size
        return RunProgress(
            step=self.step + 1,
            samples=self.samples + batch_size,
            tokens=self.tokens + batch_size * config.model.context,
            data_digest=data_digest,
            scale=scale,
        )


def step_of(checkpoint: Path) -> int:
    """Return the step that a folder is named after; -1 if it is not."""
    number = checkpoint.name.removeprefix("step-")
    return int(number) if number.isdecimal() else -1


def is_complete(checkpoint: Path) -> bool:
    """Tell whether a checkpoint was written to its end: its manifest comes last."""
    return (checkpoint / NAME).is_file()


def newer_than(checkpoint: Path) -> list[Path]:
    """List the folders of later steps, complete or not, oldest first."""
    return [path for path in _by_step(checkpoint.parent) if step_of(path) > step_of(checkpoint)]


def remove_newer(checkpoint: Path) -> None:
    """Remove what is newer than `checkpoint`, from which the run goes on; one rank calls this.

    A folder that is not whole may be all that is left of something: it is only renamed.
    """
    for path in newer_than(checkpoint):
        if is_complete(path):
            remove_folder(path)
            continue
        aside = path.with_name(_DAMAGED + path.name)
        with suppress(OSError):
            remove_folder(aside)
        path.rename(aside)


@contextmanager
def offering_older(checkpoint: Path) -> Iterator[None]:
    """Add to the refusal of a checkpoint which older one the run could go on from."""
    try:
        yield
    except CheckpointError as error:
        step = step_of(checkpoint)
        before = [path for path in _by_step(checkpoint.parent) if step_of(path) < step]
        older = [path for path in before if is_complete(path)]
        if not older:
            raise
        raise CheckpointError(
            f"{error}\nGo on from the checkpoint before it, giving up the later ones, with: "
            f"shoal train --resume {shlex.quote(str(older[-1]))} --overwrite"
        ) from error


def _by_step(checkpoints: Path) -> list[Path]:
    found = [path for path in checkpoints.glob("step-*") if path.name[5:].isdecimal()]
    return sorted(found, key=step_of)


def read_progress(checkpoint: Path) -> RunProgress:
    """Read how far a checkpoint is, without its tensors; raise if it cannot be trusted."""
    return _progress(checkpoint, _training_part(checkpoint))


def read_saved_config(checkpoint: Path) -> TrainConfig:
    """Read the config that a checkpoint was saved with."""
    tree = _training_part(checkpoint).get("config")
    return from_json(TrainConfig, tree, where=checkpoint / NAME)


def restore_state(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> RunProgress:
    """Fill model and optimizer from a checkpoint of any number of ranks; every rank calls this."""
    with offering_older(checkpoint):
        return _progress(checkpoint, load_training(checkpoint, model, optimizer))


def _training_part(checkpoint: Path) -> Mapping[str, Any]:
    """Read from a manifest what `CheckpointSaver` put there; empty if another program wrote it."""
    with offering_older(checkpoint):
        training = read_manifest(checkpoint).extra.get("training")
    return training if isinstance(training, Mapping) else {}


def _count(value: object) -> int:
    """Check a number that a manifest holds, which may come from anywhere."""
    if not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"expected a count, got {short(value)}")
    return value


def _progress(checkpoint: Path, values: Mapping[str, Any]) -> RunProgress:
    try:
        return RunProgress(
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


class SaveStatus(IntEnum):
    """How far the save in flight is on one rank."""

    NONE = 0
    RUNNING = 1
    DONE = 2
    FAILED = 3


class CheckpointSaver:
    """Writes a run's checkpoints in the background, keeps those that shall stay.

    `saved` is the newest checkpoint that is known to be whole.
    """

    def __init__(
        self, folder: RunFolder, config: TrainConfig, world: World, *, saved: Path | None
    ) -> None:
        self.saved = saved
        self._folder = folder
        self._config = config
        self._world = world
        self._leads = world.leads
        # Of rank 0: hosts may see the folder each under a number of its own.
        self._home = folder.path.stat() if world.leads else None
        self._retention = Retention(last=config.run.keep_last, every=config.run.keep_every)
        self._pending: PendingSave | None = None

    @property
    def folder_lost(self) -> bool:
        """Whether rank 0 finds that the run folder was removed or replaced."""
        return self._home is not None and self._folder.is_lost(self._home)

    def give_up(self) -> NoReturn:
        """Raise on all ranks, which know of it, that the run folder is gone."""
        if self._home is not None:
            self._folder.drop_remains(self._home)
        raise self._folder.lost_error()

    @property
    def status(self) -> SaveStatus:
        """How far the save in flight is on this rank."""
        if self._pending is None:
            return SaveStatus.NONE
        if not self._pending.done:
            return SaveStatus.RUNNING
        try:
            self._pending.check()
        except CheckpointError:
            return SaveStatus.FAILED
        return SaveStatus.DONE

    def follow(self, statuses: set[float]) -> None:
        """Conclude a save that all ranks have finished, raise one that failed; collective.

        `statuses` are those of all ranks: all hear of a failure in the same step, and raise in it.
        """
        if SaveStatus.FAILED in statuses or statuses == {SaveStatus.DONE}:
            self.finish()

    def start(self, model: nn.Module, optimizer: Optimizer, progress: RunProgress) -> None:
        """Copy the state of a step, and write it while training goes on; collective.

        Waits for the save before it. What is saved already is not saved again.
        """
        self.finish()
        if self.saved is not None and step_of(self.saved) == progress.step:
            return
        folder = step_folder(self._folder.checkpoints, progress.step)
        with self._noticing_loss(), waiting("all ranks to begin a save"):
            extra = {**asdict(progress), "config": to_json(self._config)}
            tensors, values = training_state(model, optimizer, extra)
            # A run folder that was removed meanwhile is not made anew.
            self._pending = async_save(folder, tensors, values, parents=False)

    def take_over(self) -> None:
        """Go on after a rank died, which may have been saving: that save is given up; collective.

        Whether it was published in spite of that, the first rank says for all.
        """

        def look() -> Path | None:
            drop_unfinished(self._folder.checkpoints)
            return latest(self._folder.checkpoints)

        self.saved = self._world.share(look) or self.saved

    def finish(self) -> Path | None:
        """Wait for the save in flight, if there is one, and return `saved`; collective."""
        pending, self._pending = self._pending, None
        if pending is not None:
            while not pending.done:  # a slow disk is no rank that stays away
                time.sleep(_POLL_S)
            with self._noticing_loss(), waiting("all ranks to end a save"):
                self.saved = pending.wait()
            if self._leads:
                self._drop_old(self.saved.parent)
        return self.saved

    def _drop_old(self, checkpoints: Path) -> None:
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
            if self._folder.config.exists():
                raise
            raise self._folder.lost_error() from error
