"""Checkpoints in a folder of a file system that all ranks see: one folder for each.

It is filled under a hidden name and renamed. Every file, and the names in a folder, are on the disk
before the name is there. No link is followed to a file, and no pipe is waited for.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

from shoal.checkpoint.storage import Checkpoint, Storage, partial_name, storage_errors, taken
from shoal.errors import CheckpointError, UsageError
from shoal.files import open_regular, remove_folder

Folder: TypeAlias = "str | os.PathLike[str]"
"""How callers name a folder."""


def checkpoint_at(folder: Folder | Checkpoint | None) -> Checkpoint:
    """The checkpoint that a caller names by its folder, or by itself.

    Raises UsageError for what `latest` gives where there is none.
    """
    if folder is None:
        raise UsageError(
            "there is no checkpoint to load: `latest` gives None before the first one is saved. "
            "Load only if it gives a folder"
        )
    if isinstance(folder, Checkpoint):
        return folder
    path = Path(folder)
    return Checkpoint(DiskStorage(path.parent), path.name)


def storage_at(checkpoints: Folder | Storage) -> Storage:
    """The storage that a caller names by the folder of its checkpoints, or by itself."""
    if isinstance(checkpoints, str | os.PathLike):
        return DiskStorage(Path(checkpoints))
    return checkpoints


@contextmanager
def disk_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that says what could not be done, where and why."""
    with storage_errors(doing, path), _telling_room(path):
        yield


@dataclass(frozen=True, slots=True)
class DiskStorage:
    """Checkpoints as folders beside each other in `folder`."""

    folder: Path

    def locate(self, name: str, file: str = "") -> str:
        """Give the path."""
        return str(self.folder / name / file)

    def names(self, name: str = "") -> list[str]:
        """List a folder; see `Storage`."""
        try:
            return os.listdir(self.folder / name)
        except (FileNotFoundError, NotADirectoryError):
            if name:
                raise
            return []

    def exists(self, name: str, file: str = "") -> bool:
        """Look for a folder, or for a regular file in it."""
        return self._path(name, file).is_file() if file else self._path(name).exists()

    def open(self, name: str, file: str) -> DiskFile:
        """Open a regular file that is in the folder itself: no link, no pipe."""
        return DiskFile(open_regular(self._path(name, file)))

    def create(self, name: str, *, parents: bool) -> str:
        """Make an empty hidden folder beside the checkpoint to be."""
        self._check_absent(name)
        partial = partial_name(name)
        path = self._path(partial)
        with _telling_room(path):
            path.mkdir(parents=parents)
        return partial

    def write(
        self, name: str, file: str, chunks: Iterable[bytes | memoryview], num_bytes: int
    ) -> None:
        """Write a new file, and return when the disk has it."""
        path = self._path(name, file)
        with _telling_room(path, num_bytes), path.open("xb") as opened:
            for chunk in chunks:
                opened.write(chunk)
            opened.flush()
            os.fsync(opened.fileno())
            size = os.fstat(opened.fileno()).st_size
        if size != num_bytes:
            raise CheckpointError(
                f"{path} has {size:,} bytes where {num_bytes:,} were written to it"
            )

    def remove(self, name: str, file: str) -> None:
        """Remove a file."""
        self._path(name, file).unlink(missing_ok=True)

    def publish(self, partial: str, name: str) -> None:
        """Rename the filled folder when the disk has the names in it."""
        staging = self._path(partial)
        _sync_folder(staging)
        self._check_absent(name)
        staging.rename(self._path(name))
        _sync_folder(self.folder)

    def discard(self, partial: str) -> None:
        """Remove an unfinished folder, as far as that is possible.

        It is renamed first: other ranks may still be writing files, which would keep it from going,
        and who waits for the outcome of the save looks whether the name is there.
        """
        staging = self._path(partial)
        aside = staging.with_name(f"{partial}-gone")
        with suppress(OSError):
            os.rename(staging, aside)
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(staging, ignore_errors=True)

    def delete(self, name: str) -> None:
        """Rename a folder, then remove it; of a link, the link and nothing that it leads to."""
        aside = self._path(partial_name(name))
        self._path(name).rename(aside)
        remove_folder(aside)

    def point(self, link: str, name: str) -> None:
        """Let a symbolic link in the folder name a checkpoint, at once for all readers."""
        partial = self._path(f".{link}-{secrets.token_hex(6)}")
        partial.symlink_to(name)
        os.replace(partial, self._path(link))
        _sync_folder(self.folder)

    def _path(self, name: str, file: str = "") -> Path:
        if os.path.basename(file) != file or file in (".", ".."):
            raise OSError(errno.EINVAL, "it is not the name of a file in a folder", file)
        return self.folder / name / file

    def _check_absent(self, name: str) -> None:
        """Raise if something has the checkpoint's name already; not an empty folder.

        One that is empty may have been made for this very purpose. Renaming takes its place, and
        fails if something has come into it meanwhile.
        """
        path = self._path(name)
        is_folder = path.is_dir() and not path.is_symlink()
        if os.path.lexists(path) and not (is_folder and not any(path.iterdir())):
            raise taken(path)


class DiskFile:
    """A regular file that is open to be read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    @property
    def num_bytes(self) -> int:
        """How long the file is now."""
        return os.fstat(self._file.fileno()).st_size

    def read(self, start: int, num_bytes: int) -> bytes:
        """Give bytes from `start` on; fewer only where the file ends."""
        data = os.pread(self._file.fileno(), num_bytes, start)
        while len(data) < num_bytes:
            # A system call gives 2 GiB at most, and may be interrupted.
            more = os.pread(self._file.fileno(), num_bytes - len(data), start + len(data))
            if not more:
                break
            data += more
        return data

    def read_into(self, start: int, memory: memoryview) -> int:
        """Fill memory from its beginning, as far as one system call does."""
        return os.preadv(self._file.fileno(), [memory], start)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _sync_folder(folder: Path) -> None:
    """Return when the disk has the names that a folder holds."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _telling_room(path: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Let the refusal of a full disk say how much is needed, and how much is free."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        text = f"{error.strerror or error}. {_room(path, needed_bytes)}"
        raise OSError(error.errno, text) from error


def _room(path: Path, needed_bytes: int) -> str:
    """Count as free what the unfinished file takes."""
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    taken_bytes = path.stat().st_blocks * 512 if path.is_file() else 0
    free = shutil.disk_usage(existing).free + taken_bytes
    needs = f"{needed_bytes:,} bytes are needed, " if needed_bytes else ""
    return f"{needs}{free:,} bytes are free there"
