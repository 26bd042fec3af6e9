"""The checkpoints of one run beside each other: which are newer, and which are whole."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.checkpoint.manifest import NAME
from shoal.errors import CheckpointError
from shoal.files import remove_folder

_DAMAGED = "damaged-"


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


def clear_way(checkpoint: Path) -> None:
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
        older = [
            path
            for path in _by_step(checkpoint.parent)
            if step_of(path) < step_of(checkpoint) and is_complete(path)
        ]
        if not older:
            raise
        raise CheckpointError(
            f"{error}\nGo on from the checkpoint before it, giving up the later ones, with: "
            f"shoal train --resume {shlex.quote(str(older[-1]))} --overwrite"
        ) from error


def _by_step(checkpoints: Path) -> list[Path]:
    found = [path for path in checkpoints.glob("step-*") if path.name[5:].isdecimal()]
    return sorted(found, key=step_of)
