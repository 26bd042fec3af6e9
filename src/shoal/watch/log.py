"""The last collectives that a rank launched, where others can read them after its death.

The log is a ring of lines in a file that is mapped into memory: writing costs microseconds and no
system call, and what was written outlives the process. gloo ends a process without a word when the
sizes of a collective do not match, so nothing can be asked of it afterwards.
"""

from __future__ import annotations

import mmap
import threading
import zlib
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch

from shoal.files import create, read_regular

_LINE_BYTES = 256
_NUM_LINES = 128
IN_STREAM, ENDED = "in stream", "ended"


Line: TypeAlias = tuple[int, str]
"""The number and the text of a line."""
InStream: TypeAlias = "tuple[Line, torch.cuda.Event]"
"""A collective that a stream was given: its line, and what marks its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedCollective:
    """One collective, as one rank launched it."""

    group: str
    number: int
    """Its place among the collectives of the group, from 1."""
    what: str
    size: str
    state: str = field(default="", compare=False)
    """`IN_STREAM` or `ENDED`, for a collective that a CUDA stream runs and no host waits for."""

    def __str__(self) -> str:
        size = f" ({self.size})" if self.size else ""
        running = ", which its device has not ended" if self.state == IN_STREAM else ""
        return f"{self.what}{size}{running}"


class CollectiveLog:
    """Remembers what this rank launched, in a file if `path` says where."""

    def __init__(self, path: Path | None = None) -> None:
        num_bytes = _LINE_BYTES * _NUM_LINES
        if path is None:
            self._memory = mmap.mmap(-1, num_bytes)
        else:
            with create(path) as file:
                file.truncate(num_bytes)
                self._memory = mmap.mmap(file.fileno(), num_bytes)
        self._count = 0
        self._counts: dict[str, int] = {}
        self._digest = 0
        self._last: Line = (-1, "")
        self._in_stream: deque[InStream] = deque()
        self._events: list[torch.cuda.Event] = []
        self._lock = threading.Lock()

    def add(self, group: str, what: str, size: str) -> Line:
        """Note a collective that is about to start; returns its line."""
        number = self._counts.get(group, 0) + 1
        self._counts[group] = number
        self._last = line = (self._count, f"{self._count}\t{group}\t{number}\t{what}\t{size}")
        self._write(*line)
        self._count += 1
        self._digest = zlib.crc32(f"{what}\t{size}".encode(), self._digest)
        return line

    def put_in_stream(self, line: Line | None = None) -> None:
        """Note that the current CUDA stream runs a collective: the one added last, or of a line.

        An event marks its end. Nobody waits for it: it is asked, here and by `entries`.
        """
        if torch.cuda.is_current_stream_capturing():  # it runs whenever the graph is replayed
            return
        event = self._events.pop() if self._events else torch.cuda.Event()
        event.record()
        line = line or self._last
        self._write_state(line, IN_STREAM)
        with self._lock:
            self._in_stream.append((line, event))
            while self._in_stream and self._in_stream[0][1].query():
                self._note_end(self._in_stream.popleft())

    def _note_ended(self) -> None:
        """Look which collectives have ended; those of two streams may do so in any order."""
        with self._lock, suppress(RuntimeError):  # of a device that has failed
            for one in tuple(self._in_stream):
                if one[1].query():
                    self._in_stream.remove(one)
                    self._note_end(one)

    def _note_end(self, one: InStream) -> None:
        line, event = one
        self._events.append(event)
        self._write_state(line, ENDED)

    def _write_state(self, line: Line, state: str) -> None:
        number, text = line
        if number >= self._count - _NUM_LINES:  # else its line is another one's by now
            self._write(number, f"{text}\t{state}")

    def _write(self, number: int, text: str) -> None:
        line = f"{text}\n".encode()[:_LINE_BYTES]
        start = number % _NUM_LINES * _LINE_BYTES
        self._memory[start : start + len(line)] = line

    def take_digest(self) -> int:
        """A number that ranks share if they launched the same since this was last asked.

        Groups do not count: ranks that do the same may do it in groups of their own.
        """
        digest, self._digest = self._digest, 0
        return digest

    def entries(self) -> list[LoggedCollective]:
        """The collectives that the log still holds, oldest first."""
        self._note_ended()
        return _parsed(bytes(self._memory))


def log_path(folder: Path, rank: int) -> Path:
    """The path of a rank's log in the folder that the ranks share."""
    return folder / f"rank-{rank}.collectives"


def logged_ranks(folder: Path) -> list[int]:
    """List the ranks that have left a log in a folder."""
    numbers = [path.stem.removeprefix("rank-") for path in folder.glob("rank-*.collectives")]
    return sorted(int(number) for number in numbers if number.isdecimal())


def read_log(path: Path) -> list[LoggedCollective]:
    """Read the log of another rank, be it alive or not; nothing if there is none."""
    try:
        return _parsed(read_regular(path, _LINE_BYTES * _NUM_LINES))
    except OSError:
        return []


def _parsed(memory: bytes) -> list[LoggedCollective]:
    found: dict[int, LoggedCollective] = {}
    for start in range(0, len(memory), _LINE_BYTES):
        line, end, _ = memory[start : start + _LINE_BYTES].partition(b"\n")
        with suppress(ValueError):  # a line that was being written, or one too long for its place
            count, group, number, what, size, *state = line.decode().split("\t")
            if end:
                found[int(count)] = LoggedCollective(
                    group=group, number=int(number), what=what, size=size, state="".join(state)
                )
    return [found[count] for count in sorted(found)]
