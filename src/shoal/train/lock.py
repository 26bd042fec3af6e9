"""The lock of a run folder: one run at a time writes into it.

The operating system frees it when its holder dies, however it dies; the file itself stays.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from shoal.errors import UsageError
from shoal.files import open_own, open_regular, read_regular, write_all

_MOST_BYTES = 256
"""Of the holder's name; a file that came from elsewhere may hold anything."""


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock at `path`, which lies in the folder it guards; raise if another holds it."""
    with open_own(path) as file:
        _acquire(file, path, fcntl.LOCK_EX)
        file.truncate(0)
        write_all(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield


def check_unlocked(path: Path) -> None:
    """Raise a `UsageError` if someone holds the lock now; any number may look at once."""
    with suppress(FileNotFoundError), open_regular(path) as file:
        _acquire(file, path, fcntl.LOCK_SH)


def _acquire(file: BinaryIO, path: Path, kind: int) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"{path.parent} is in use by {_holder(path)}; wait for it to end, stop it with Ctrl-C "
            f"or SIGTERM, or choose another --name"
        ) from None
    except OSError:
        # Some network file systems have no locks: better to train unguarded than not at all.
        return


def _holder(path: Path) -> str:
    with suppress(OSError):
        text = read_regular(path, _MOST_BYTES).decode(errors="replace").strip()
        if text.isprintable() and text:
            return text
    return "another process"
