"""A run's checkpoints by their steps: the newest one, and which of them stay."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from shoal.checkpoint.disk import DiskStorage, Folder, disk_errors, storage_at
from shoal.checkpoint.manifest import NAME
from shoal.checkpoint.storage import Checkpoint, Storage, is_partial, storage_errors
from shoal.errors import UsageError

LINK = "latest"

_STEP_NAME = re.compile(r"step-(\d{8,})")


@overload
def step_folder(checkpoints: Folder, step: int) -> Path: ...
@overload
def step_folder(checkpoints: Storage, step: int) -> Checkpoint: ...
def step_folder(checkpoints: Folder | Storage, step: int) -> Path | Checkpoint:
    """Name the checkpoint of a step."""
    return _placed(checkpoints, f"step-{step:08d}")


@overload
def latest(checkpoints: Folder) -> Path | None: ...
@overload
def latest(checkpoints: Storage) -> Checkpoint | None: ...
def latest(checkpoints: Folder | Storage) -> Path | Checkpoint | None:
    """Find the complete checkpoint of the highest step, or None; unfinished ones do not count."""
    found = _complete_steps(storage_at(checkpoints))
    return _placed(checkpoints, found[max(found)]) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Keep the `last` newest checkpoints, and those whose step is a multiple of `every`.

    Zero for `last` keeps all; zero for `every` keeps none beyond the last ones.
    """

    last: int = 0
    every: int = 0

    def __post_init__(self) -> None:
        if self.last < 0 or self.every < 0:
            raise UsageError(
                f"expected numbers of checkpoints of 0 or more, got last={self.last}, "
                f"every={self.every}"
            )

    def expired(self, steps: list[int]) -> list[int]:
        """The steps whose checkpoints may go; never the newest."""
        if not self.last:
            return []
        old = sorted(steps)[: -self.last]
        return [step for step in old if not self.every or step % self.every]

    @overload
    def apply(self, checkpoints: Folder) -> list[Path]: ...
    @overload
    def apply(self, checkpoints: Storage) -> list[Checkpoint]: ...
    def apply(self, checkpoints: Folder | Storage) -> list[Path] | list[Checkpoint]:
        """Remove the complete checkpoints that may go, and say which; one rank calls this."""
        storage = storage_at(checkpoints)
        found = _complete_steps(storage)
        removed = [found[step] for step in self.expired(list(found))]
        for name in removed:
            Checkpoint(storage, name).delete()
        return [_placed(checkpoints, name) for name in removed]  # pyright: ignore[reportReturnType]


def point_latest(checkpoints: Folder) -> Path | None:
    """Let the link `latest` name the newest checkpoint, at once for all readers; one rank calls.

    A convenience for people: `shoal.checkpoint.latest` looks at the folders themselves.
    """
    newest = latest(checkpoints)
    if newest is not None:
        with disk_errors("write", newest.with_name(LINK)):
            DiskStorage(newest.parent).point(LINK, newest.name)
    return newest


def drop_unfinished(checkpoints: Folder | Storage) -> None:
    """Remove the partial checkpoints of saves that died; no save may be running."""
    storage = storage_at(checkpoints)
    for name in _names(storage):
        if is_partial(name):
            storage.discard(name)


def _complete_steps(storage: Storage) -> dict[int, str]:
    """List the complete checkpoints of a storage by their steps."""
    return {
        int(match[1]): name
        for name in _names(storage)
        if (match := _STEP_NAME.fullmatch(name)) and Checkpoint(storage, name).exists(NAME)
    }


def _names(storage: Storage) -> list[str]:
    with storage_errors("list", storage.locate("")):
        return storage.names()


def _placed(checkpoints: Folder | Storage, name: str) -> Path | Checkpoint:
    """A checkpoint among others, named as the caller named those."""
    if isinstance(checkpoints, str | os.PathLike):
        return Path(checkpoints) / name
    return Checkpoint(checkpoints, name)
