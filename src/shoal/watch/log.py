"""The last collectives that a rank launched, where others can read them after its death.

The log is a ring of lines in a file that is mapped into memory: writing costs microseconds and no
system call, and what was written outlives the process. gloo ends a process without a word when the
sizes of a collective do not match, so nothing can be asked of it afterwards.
"""

from __future__ import annotations

import mmap
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LINE_BYTES = 256
_NUM_LINES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One collective, as one rank launched it."""

    group: str
    number: int
    """Its place among the collectives of the group, from 1."""
    what: str
    size: str

    def __str__(self) -> str:
        return f"{self.what} ({self.size})"


class CollectiveLog:
    """Remembers what this rank launched, in a file if `path` says where."""

    def __init__(self, path: Path | None = None) -> None:
        num_bytes = _LINE_BYTES * _NUM_LINES
        if path is None:
            self._memory = mmap.mmap(-1, num_bytes)
        else:
            with path.open("w+b") as file:
                file.truncate(num_bytes)
                self._memory = mmap.mmap(file.fileno(), num_bytes)
        self._count = 0
        self._counts: dict[str, int] = {}
        self._digest = 0

    def add(self, group: str, what: str, size: str) -> None:
        """Note a collective that is about to start."""
        number = self._counts.get(group, 0) + 1
        self._counts[group] = number
        line = f"{self._count}\t{group}\t{number}\t{what}\t{size}\n".encode()[:_LINE_BYTES]
        start = self._count % _NUM_LINES * _LINE_BYTES
        self._memory[start : start + len(line)] = line
        self._count += 1
        self._digest = zlib.crc32(f"{what}\t{size}".encode(), self._digest)

    def take_digest(self) -> int:
        """A number that ranks share if they launched the same since this was last asked.

        Groups do not count: ranks that do the same may do it in groups of their own.
        """
        digest, self._digest = self._digest, 0
        return digest

    def entries(self) -> list[Entry]:
        """What it remembers, oldest first."""
        return _parsed(bytes(self._memory))


def log_path(folder: Path, rank: int) -> Path:
    """Where the log of a rank lies in the folder that the ranks share."""
    return folder / f"rank-{rank}.collectives"


def read_log(path: Path) -> list[Entry]:
    """Read the log of another rank, be it alive or not; nothing if there is none."""
    try:
        return _parsed(path.read_bytes())
    except OSError:
        return []


def _parsed(memory: bytes) -> list[Entry]:
    found: dict[int, Entry] = {}
    for start in range(0, len(memory), _LINE_BYTES):
        line, end, _ = memory[start : start + _LINE_BYTES].partition(b"\n")
        with suppress(ValueError):  # a line that was being written, or one too long for its place
            count, group, number, what, size = line.decode().split("\t")
            if end:
                found[int(count)] = Entry(group=group, number=int(number), what=what, size=size)
    return [found[count] for count in sorted(found)]
