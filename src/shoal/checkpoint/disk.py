"""The operating system's side: bytes that are on the disk, and refusals that name the path."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import CheckpointError

_HINTS = {
    errno.ENOSPC: "Free some space, or save elsewhere",
    errno.EDQUOT: "Free some of your quota, or save elsewhere",
    errno.EROFS: "Save to a folder that can be written",
    errno.EACCES: "Change the permissions, or use another folder",
    errno.EPERM: "Change the permissions, or use another folder",
    errno.ENOENT: "Every rank must see the same folder: use a shared file system",
}


@contextmanager
def disk_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that says what could not be done, where and why."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        hint = _HINTS.get(number, "")
        if number in (errno.ENOSPC, errno.EDQUOT):
            hint = f"{_free(path)}. {hint}"
        message = f"cannot {doing} {path}: {error.strerror or error}"
        raise CheckpointError(f"{message}. {hint}" if hint else message) from error


def write_synced(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a new file, and return when the disk has it."""
    with disk_errors("write", path), path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Return when the disk has the names that a folder holds."""
    with disk_errors("sync", folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _free(path: Path) -> str:
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    return f"{shutil.disk_usage(existing).free:,} bytes are free there"
