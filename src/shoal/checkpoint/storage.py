"""Where checkpoints are kept: the few operations that a storage offers, and one checkpoint in it.

    Storage        checkpoints beside each other, by name; `disk.DiskStorage` keeps them in a folder
    └── Checkpoint    one of them, complete or partial: what saving and loading are given
        └── OpenFile     one of its files, open to be read

A checkpoint is made as a partial one, filled by all ranks, each with its file, and published at
once. Another storage, such as an object store, is one class with the methods of `Storage`.
"""

from __future__ import annotations

import errno
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Protocol

from shoal.errors import CheckpointError

_PARTIAL = re.compile(r"\..*\.saving-.*", re.DOTALL)

_HINTS = {
    errno.ENOSPC: "Free some space, or save elsewhere",
    errno.EDQUOT: "Free some of your quota, or save elsewhere",
    errno.EROFS: "Save to a folder that can be written",
    errno.EACCES: "Change the permissions, or use another folder",
    errno.EPERM: "Change the permissions, or use another folder",
    errno.ELOOP: "Links are not followed inside a checkpoint: copy the file itself there",
    errno.ENOENT: "Every rank must see the same folder: use a shared file system",
}


class OpenFile(Protocol):
    """A file that is open to be read: its bytes stay those of one file."""

    @property
    def num_bytes(self) -> int:
        """How long the file is."""
        ...

    def read(self, start: int, num_bytes: int) -> bytes:
        """Give that many bytes from `start` on; fewer only where the file ends."""
        ...

    def read_into(self, start: int, memory: memoryview) -> int:
        """Fill memory from its beginning; say how many bytes came, 0 where the file ends."""
        ...

    def close(self) -> None:
        """Let go of the file."""
        ...


class Storage(Protocol):
    """A place that keeps checkpoints by name, each a set of files by name. All ranks see it.

    Methods raise an `OSError` for whatever the storage refuses: `Checkpoint` says where, and what
    was being done. Names of files may come from somebody else: none may lead out of its checkpoint,
    and nothing but a regular file is opened, without waiting for anyone.
    """

    def locate(self, name: str, file: str = "") -> str:
        """Say where a checkpoint, or a file of it, is, for people to read."""
        ...

    def names(self, name: str = "") -> list[str]:
        """List all checkpoints, also partial ones; with a name, the files of that one.

        No checkpoints where the place is not there yet.
        """
        ...

    def exists(self, name: str, file: str = "") -> bool:
        """Whether a checkpoint, complete or partial, is there; with a file, whether it has that.

        Asked again and again by ranks that wait: it should cost little.
        """
        ...

    def open(self, name: str, file: str) -> OpenFile:
        """Open a file to read it; raises unless it is a regular one."""
        ...

    def create(self, name: str, *, parents: bool) -> str:
        """Make an empty partial checkpoint, which will become `name`; return its `partial_name`.

        Raises `taken` if there is something of that name. Without `parents` the place has to be
        there already.
        """
        ...

    def write(
        self, name: str, file: str, chunks: Iterable[bytes | memoryview], num_bytes: int
    ) -> None:
        """Write a new file of `num_bytes`, and return when it would survive a crash.

        Until then others may see a part of it.
        """
        ...

    def remove(self, name: str, file: str) -> None:
        """Remove a file of a partial checkpoint, if it is there."""
        ...

    def publish(self, partial: str, name: str) -> None:
        """Give a filled checkpoint its name: a crash before or after leaves none, or all of it.

        Raises `taken` if there is something of that name. Returns when it would survive a crash.
        """
        ...

    def discard(self, partial: str) -> None:
        """Remove a partial checkpoint as far as possible, while others may still write into it.

        Its name is gone at once. Never raises.
        """
        ...

    def delete(self, name: str) -> None:
        """Remove a complete checkpoint; a crash leaves no half of it under its name."""
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint in a storage, by its name: complete, partial, or not there yet.

    Its methods raise `CheckpointError`, which says where, but for `open`.
    """

    storage: Storage
    name: str

    def __str__(self) -> str:
        return self.storage.locate(self.name)

    def locate(self, file: str) -> str:
        """Say where a file is, for people to read."""
        return self.storage.locate(self.name, file)

    def exists(self, file: str = "") -> bool:
        """Whether the checkpoint, or a file of it, is there."""
        with storage_errors("find", self.locate(file)):
            return self.storage.exists(self.name, file)

    def open(self, file: str) -> OpenFile:
        """Open a file to read it. Raises an OSError: the reader knows what it wants it for."""
        return self.storage.open(self.name, file)

    def read_whole(self, file: str, max_bytes: int) -> bytes:
        """Read a file, unless it is longer than a real one of its kind."""
        where = self.locate(file)
        with storage_errors("read", where), closing(self.open(file)) as opened:
            num_bytes = opened.num_bytes
            if num_bytes > max_bytes:
                raise CheckpointError(
                    f"{where} has {num_bytes:,} bytes, and {max_bytes:,} is the most that is read"
                )
            return opened.read(0, num_bytes)

    def create(self, *, parents: bool = True) -> Checkpoint:
        """Make the partial checkpoint that will become this one; see `Storage.create`."""
        with storage_errors("make", self):
            return Checkpoint(self.storage, self.storage.create(self.name, parents=parents))

    def write(self, file: str, chunks: Iterable[bytes | memoryview], num_bytes: int) -> None:
        """Write a new file, and return when it would survive a crash."""
        with storage_errors("write", self.locate(file)):
            self.storage.write(self.name, file, chunks, num_bytes)

    def remove(self, file: str) -> None:
        """Remove a file of a partial checkpoint, if it is there."""
        with storage_errors("remove", self.locate(file)):
            self.storage.remove(self.name, file)

    def publish(self, checkpoint: Checkpoint) -> None:
        """Let this partial one become the checkpoint, all at once."""
        with storage_errors("publish", checkpoint):
            self.storage.publish(self.name, checkpoint.name)

    def discard(self) -> None:
        """Remove this partial checkpoint as far as possible."""
        self.storage.discard(self.name)

    @contextmanager
    def discarded_on_error(self) -> Iterator[Checkpoint]:
        """Discard this partial checkpoint if the block raises."""
        try:
            yield self
        except BaseException:
            self.discard()
            raise

    def delete(self) -> None:
        """Remove this complete checkpoint."""
        with storage_errors("remove", self):
            self.storage.delete(self.name)


def partial_name(name: str) -> str:
    """Name a partial checkpoint, anew each time.

    A save that died leaves its own behind, and another must never be published together with it.
    """
    return f".{name}.saving-{secrets.token_hex(6)}"


def is_partial(name: str) -> bool:
    """Whether a checkpoint has the name of one that was not published."""
    return _PARTIAL.fullmatch(name) is not None


def taken(where: object) -> CheckpointError:
    """The error where something has the name that a checkpoint should get."""
    return CheckpointError(
        f"{where} exists already, and a checkpoint is never overwritten: "
        "choose another name, or delete it first"
    )


@contextmanager
def storage_errors(doing: str, where: object) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that says what could not be done, where and why."""
    try:
        yield
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "")
        message = f"cannot {doing} {where}: {error.strerror or error}"
        raise CheckpointError(f"{message}. {hint}" if hint else message) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class FileNames:
    """The names that a format gives its files: none of them leaves its checkpoint.

    A manifest, an index or DCP's metadata may come from somebody else. So every name in them is
    compared before anything is opened.
    """

    pattern: re.Pattern[str]
    example: str

    def check(self, name: object) -> str:
        """Give the name back; raises CheckpointError unless it is one of the format."""
        if not isinstance(name, str) or not self.pattern.fullmatch(name):
            raise CheckpointError(f"expected a file name like {self.example}, got {name!r:.100}")
        return name
