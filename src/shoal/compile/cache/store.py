"""A folder of files, one for each key: whole, or as good as not there.

Several processes may read and write at once: a file comes into being under its name by one rename,
and two that write the same key write the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.compile.cache.errors import DamagedError
from shoal.compile.cache.values import Json

FORMAT = 1
"""Raised when files of an older version can no longer be read."""

MOST_BYTES = 512 * 2**20
"""What the folder may hold by default; what was not used for longest goes first."""

_ENDING, _UNFINISHED = ".json", ".unfinished"
_LEFT_BEHIND_S = 3600
"""A file is written in a moment: one this old was left by a process that died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Files in a folder that holds at most so many bytes."""

    folder: Path
    most_bytes: int = MOST_BYTES

    def read(self, key: str) -> Json | None:
        """What was written under a key; None if nothing was."""
        file = self._file(key)
        try:
            text = file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DamagedError(f"{file} cannot be read: {error}") from error
        content = _checked(text, key)
        with suppress(OSError):
            os.utime(file)  # used now: others go first
        return content

    def write(self, key: str, content: Json) -> None:
        """Write a file, whole or not at all, and remove old ones that are too many."""
        text = _with_checksum(content, key)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(suffix=_UNFINISHED, dir=self.folder, delete=False) as file:
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, self._file(key))
            except BaseException:
                with suppress(OSError):
                    os.unlink(file.name)
                raise
        self._evict()

    def remove(self, key: str) -> None:
        """Remove what cannot be read."""
        with suppress(OSError):
            self._file(key).unlink()

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}{_ENDING}"

    def _evict(self) -> None:
        found: list[tuple[float, int, Path]] = []
        for file in self.folder.iterdir():
            # Another process may remove what this one looks at.
            with suppress(FileNotFoundError):
                status = file.stat()
                if file.suffix == _ENDING:
                    found.append((status.st_mtime, status.st_size, file))
                elif file.suffix == _UNFINISHED and time.time() - status.st_mtime > _LEFT_BEHIND_S:
                    file.unlink()
        total = sum(size for _, size, _ in found)
        for _, size, file in sorted(found):
            if total <= self.most_bytes:
                return
            with suppress(FileNotFoundError):
                file.unlink()
            total -= size


def _with_checksum(content: Json, key: str) -> bytes:
    """Two lines: what the second must be, and the second."""
    body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    head = {"shoal": FORMAT, "key": key, "sha256": hashlib.sha256(body).hexdigest()}
    return json.dumps(head).encode() + b"\n" + body


def _checked(text: bytes, key: str) -> Json:
    head, _, body = text.partition(b"\n")
    expected = {"shoal": FORMAT, "key": key, "sha256": hashlib.sha256(body).hexdigest()}
    try:
        if json.loads(head) != expected:
            raise DamagedError("its first line does not fit the rest")
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"it is no JSON: {error}") from error
