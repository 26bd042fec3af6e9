"""The operating system's side: bytes that are on the disk, and refusals that name the path."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from shoal.errors import CheckpointError
from shoal.files import open_regular

__all__ = ["Folder", "disk_errors", "open_regular", "read_whole", "sync_folder", "write_synced"]

Folder: TypeAlias = "str | os.PathLike[str]"
"""How callers name a folder."""

_HINTS = {
    errno.ENOSPC: "Free some space, or save elsewhere",
    errno.EDQUOT: "Free some of your quota, or save elsewhere",
    errno.EROFS: "Save to a folder that can be written",
    errno.EACCES: "Change the permissions, or use another folder",
    errno.EPERM: "Change the permissions, or use another folder",
    errno.ELOOP: "Links are not followed inside a checkpoint: copy the file itself there",
    errno.ENOENT: "Every rank must see the same folder: use a shared file system",
}


@contextmanager
def disk_errors(doing: str, path: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that says what could not be done, where and why."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        hint = _HINTS.get(number, "")
        if number in (errno.ENOSPC, errno.EDQUOT):
            hint = f"{_room(path, needed_bytes)}. {hint}"
        message = f"cannot {doing} {path}: {error.strerror or error}"
        raise CheckpointError(f"{message}. {hint}" if hint else message) from error


def write_synced(path: Path, chunks: Iterable[bytes | memoryview], num_bytes: int) -> None:
    """Write a new file of `num_bytes`, and return when the disk has it."""
    with disk_errors("write", path, num_bytes), path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
    if size != num_bytes:
        raise CheckpointError(f"{path} has {size:,} bytes where {num_bytes:,} were written to it")


def read_whole(path: Path, max_bytes: int) -> bytes:
    """Read a regular file, unless it is longer than a real one of its kind."""
    with disk_errors("read", path), open_regular(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes > max_bytes:
            raise CheckpointError(
                f"{path} has {num_bytes:,} bytes, and {max_bytes:,} is the most that is read"
            )
        return file.read(num_bytes)


def sync_folder(folder: Path) -> None:
    """Return when the disk has the names that a folder holds."""
    with disk_errors("sync", folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _room(path: Path, needed_bytes: int) -> str:
    """Say how much is needed and how much is free, counting what the unfinished file takes."""
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    taken = path.stat().st_blocks * 512 if path.is_file() else 0
    free = shutil.disk_usage(existing).free + taken
    needs = f"{needed_bytes:,} bytes are needed, " if needed_bytes else ""
    return f"{needs}{free:,} bytes are free there"
