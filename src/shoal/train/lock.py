"""The lock of a run folder: one run at a time writes into it.

The operating system frees it when its holder dies, however it dies; the file itself stays.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import UsageError


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock at `path`, which lies in the folder it guards; raise if another holds it."""
    with path.open("a+", encoding="utf-8") as file:
        _acquire(file.fileno(), path, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def check_unlocked(path: Path) -> None:
    """Raise a `UsageError` if someone holds the lock now; any number may look at once."""
    if path.exists():
        with path.open(encoding="utf-8") as file:
            _acquire(file.fileno(), path, fcntl.LOCK_SH)


def _acquire(descriptor: int, path: Path, kind: int) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = path.read_text(encoding="utf-8").strip() or "another process"
        raise UsageError(
            f"{path.parent} is in use by {holder}; wait for it to end, stop it with Ctrl-C or "
            f"SIGTERM, or choose another --name"
        ) from None
    except OSError:
        # Some network file systems have no locks: better to train unguarded than not at all.
        return
