"""Connections of process groups, cut so that nobody waits in them any longer.

A gloo collective notices a dead rank only where it talks to that very rank; others wait for a rank
that waits. No call of torch ends such a wait, but the end of a connection does. So the sockets that
a generation of groups opened are remembered, and shut down when one of its ranks dies.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

_FOLDER = Path("/proc/self/fd")


def open_sockets() -> dict[str, int]:
    """The sockets of this process: their numbers in the kernel, with a file descriptor each."""
    found: dict[str, int] = {}
    if not _FOLDER.is_dir():
        raise NotImplementedError(
            "survive finds the connections of process groups in /proc/self/fd, which this system "
            "does not have; it runs on Linux"
        )
    for entry in os.listdir(_FOLDER):
        with suppress(OSError):
            target = os.readlink(_FOLDER / entry)
            if target.startswith("socket:"):
                found[target] = int(entry)
    return found


class Connections:
    """The sockets that were opened since this was made, until `seal`."""

    def __init__(self) -> None:
        self._before = frozenset(open_sockets())
        self._own: frozenset[str] | None = None

    def seal(self) -> None:
        """All are open; what is opened from now on is somebody else's."""
        self._own = frozenset(open_sockets()) - self._before

    def cut(self) -> int:
        """Shut down those that are open and connected; returns how many."""
        num_cut = 0
        for name, descriptor in open_sockets().items():
            if name in self._before or (self._own is not None and name not in self._own):
                continue
            with suppress(OSError):
                num_cut += _shut_down(descriptor, name)
        return num_cut


def _shut_down(descriptor: int, name: str) -> bool:
    copy = os.dup(descriptor)
    # The descriptor may have become another file in the meantime.
    if os.readlink(_FOLDER / str(copy)) != name:
        os.close(copy)
        return False
    with socket.socket(fileno=copy) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False  # gloo ends the process when a listening socket fails
        connection.shutdown(socket.SHUT_RDWR)
        return True
