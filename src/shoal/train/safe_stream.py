"""Streams that people read: a run outlives its terminal, and the end of a pipe."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO


class SafeStream:
    """A text stream that swallows what nobody can read any more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:
        """How the stream turns text into bytes."""
        return self._stream.encoding

    def isatty(self) -> bool:
        """Tell whether the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the stream's file descriptor."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Write, or do as if."""
        try:
            return self._stream.write(text)
        except OSError:
            self._close()
            return len(text)

    def flush(self) -> None:
        """Flush, or do as if."""
        try:
            self._stream.flush()
        except OSError:
            self._close()

    def _close(self) -> None:
        """Lead the stream into the void, with what it still holds, so that nothing fails later."""
        with suppress(OSError, ValueError):
            void = os.open(os.devnull, os.O_WRONLY)
            os.dup2(void, self._stream.fileno())
            os.close(void)


def safe_stdout() -> TextIO:
    """Return what stdout is now, made safe to write to."""
    return SafeStream(sys.stdout)  # pyright: ignore[reportReturnType]


def say(text: str, *, stream: TextIO) -> None:
    """Print a line if there is someone to read it."""
    print(printable(text, keep="\n\t"), file=SafeStream(stream), flush=True)  # pyright: ignore[reportArgumentType]


def printable(text: str, *, keep: str = "") -> str:
    """Return a text with every sign that is not printed as its escape, such as `\\x1b`.

    Names and values may be anybody's. Escape sequences could move the cursor, rename the window or
    hide what follows, and signs of direction turn a name round. `keep` are signs that stay, such as
    the ends of lines.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)
