"""How a checkpoint appears: filled under a hidden name, then renamed, all at once."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from shoal.checkpoint.disk import Folder, disk_errors, sync_folder
from shoal.errors import CheckpointError


def open_staging(folder: Path, *, parents: bool = True) -> str:
    """Make an empty hidden folder beside the checkpoint to be, and return its name.

    The name is new each time: a save that died leaves its folder behind, and another must never
    be published together with what is in there. Without `parents` the folder that holds
    checkpoints has to be there.
    """
    check_absent(folder)
    staging = folder.parent / f".{folder.name}.saving-{secrets.token_hex(6)}"
    with disk_errors("make", staging):
        staging.mkdir(parents=parents)
    return staging.name


def publish(staging: Path, folder: Path) -> None:
    """Give a filled folder its name; a crash before or after leaves none, or all of it."""
    sync_folder(staging)
    check_absent(folder)
    with disk_errors("publish", folder):
        staging.rename(folder)
    sync_folder(folder.parent)


def discard(staging: Path) -> None:
    """Remove an unfinished folder, as far as that is possible.

    It is renamed first: other ranks may still be writing files, which would keep it from going,
    and who waits for the outcome of the save looks whether the name is there.
    """
    aside = staging.with_name(f"{staging.name}-gone")
    with suppress(OSError):
        os.rename(staging, aside)
    shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(staging, ignore_errors=True)


def drop_unfinished(checkpoints: Folder) -> None:
    """Remove what saves that died have left in a folder of checkpoints; nobody may be saving."""
    for staging in Path(checkpoints).glob(".*.saving-*"):
        discard(staging)


def check_absent(folder: Path) -> None:
    """Raise CheckpointError if something has the checkpoint's name already; not an empty folder.

    One that is empty may have been made for this very purpose. Renaming takes its place, and fails
    if something has come into it meanwhile.
    """
    is_folder = folder.is_dir() and not folder.is_symlink()
    with disk_errors("read", folder):
        is_empty = is_folder and not any(folder.iterdir())
    if (folder.exists() or folder.is_symlink()) and not is_empty:
        raise CheckpointError(
            f"{folder} exists already, and a checkpoint is never overwritten: "
            "choose another name, or delete it first"
        )
