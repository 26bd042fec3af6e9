"""A launcher whose ranks may die: it holds the store, and says who is gone.

    with Launcher(command(["train.py"]), num_ranks=4) as launcher:
        lost = launcher.wait()

A rank that dies of a signal is written into the log of events, and the others go on. One that ends
with an error ends the job, as everywhere.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol, Self, TypeAlias

import torch.distributed as dist

from shoal.errors import RankError
from shoal.survive.environment import of_member
from shoal.survive.generation import StoreAddress
from shoal.survive.roster import Event, EventKind, EventLog

_POLL_S = 0.01
_GRACE_S = 1.0
"""How long a process may take to end after SIGTERM."""
_KILLED_S = 10.0
"""How long after SIGKILL a process is waited for: one in the kernel's hands may stay longer."""
_HOST = "127.0.0.1"


FALLEN = "fallen"
"""Under this key ranks say that too many of them are lost."""


class LostStateError(RankError):
    """More ranks died than parity can rebuild: only a checkpoint has the state."""


class RankProcess(Protocol):
    """A process of a rank, such as a `subprocess.Popen`, in a session of its own."""

    @property
    def pid(self) -> int:
        """Its number."""
        ...

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        ...


Start: TypeAlias = Callable[[int, Mapping[str, str]], RankProcess]
"""Starts the process of a member, with these variables added to its environment."""


def command(arguments: Sequence[str]) -> Start:
    """Start ranks as this Python with some arguments."""

    return lambda _, variables: start_rank(arguments, variables)


def start_rank(arguments: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start this Python with some arguments, as a process that ends with this one."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, **variables},
        start_new_session=True,
        preexec_fn=partial(_end_with, os.getpid()),
    )


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _end_with(parent: int) -> None:
    """Let the kernel end this process when the one that started it goes, however it goes."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it went before that line
            os._exit(1)


class Launcher:
    """The processes of a job, ended for sure when the `with` block is left.

    Those that end with a status in `fine` have done what they were asked to. `num_spares`
    processes wait beside the ranks, and take the places of those that die.
    """

    def __init__(
        self, start: Start, num_ranks: int, *, num_spares: int = 0, fine: Sequence[int] = (0,)
    ) -> None:
        self._start_process = start
        self._num_ranks = num_ranks
        self._fine = fine
        self._server, self._port = _serve()
        self._server_apart, self._port_apart = _serve()
        self.store = dist.PrefixStore("survive", self._server)
        self._log = EventLog(self.store)
        self.processes: dict[int, RankProcess] = {}
        """By member; members are never used twice."""
        self.lost: list[int] = []
        """Members that died of signals, in order."""
        self._arriving: set[int] = set()
        self._joined: set[int] = set()
        self._num_spares = num_spares
        self._spares: set[int] = set()
        """Those of the arriving, or ready, that wait until they are needed."""
        self._num_missing = 0
        """How many have died whose places no spare has taken."""
        self._leaving: int | None = None
        self._size: int | None = None
        self._is_over = False

    def __enter__(self) -> Self:
        try:
            for member in range(self._num_ranks):
                self._start(member, joins=False)
        except BaseException:
            end_processes(self.processes.values())
            raise
        return self

    def __exit__(self, *_: object) -> None:
        end_processes(self.processes.values())

    def join(self) -> int:
        """Start one more process, which joins at the end of a step; returns its member number."""
        member = max(self.processes) + 1
        self._arriving.add(member)
        self._start(member, joins=True)
        return member

    def wait(self) -> list[int]:
        """Wait until all processes have ended; returns the members that died of signals.

        Raises `RankError` if one ended with an error, or if none is left.
        """
        while self.poll():
            time.sleep(_POLL_S)
        return self.lost

    def poll(self) -> bool:
        """Look at the processes once; tells whether some still run."""
        if self.store.check([FALLEN]):
            raise LostStateError(
                f"{len(self.lost)} ranks died, the members {self.lost}, too many at the same time "
                "for their state to be rebuilt from parity. Start again from the last checkpoint"
            )
        statuses = {member: own.poll() for member, own in self.processes.items()}
        for member, status in statuses.items():
            if status is None or status in self._fine or member in self.lost:
                continue
            if status > 0:
                if self.store.check([FALLEN]):
                    return self.poll()
                raise RankError(f"member {member} ended with status {status}, which ends the job")
            self.lost.append(member)
            if member in self._arriving:  # nobody has heard of it
                self._arriving.discard(member)
                self._spares.discard(member)
            else:
                self._log.post(Event(kind=EventKind.LOST, member=member))
                self._num_missing += 1
        for member in sorted(self._arriving):
            if member in self._spares and not self._num_missing:
                continue
            if self.store.check([f"arrivals/{member}"]):
                self._let_in(member)
        running = [member for member, status in statuses.items() if status is None]
        if any(self._has_entered(member) for member in running):
            self._resize()
            for _ in range(self._num_spares - len(self._spares)):
                self._spares.add(self.join())
            return True
        # Those that still run came too late to be let in.
        if not any(status in self._fine for status in statuses.values()):
            raise LostStateError(f"all {len(self.lost)} ranks died: nobody is left to go on")
        end_processes(self.processes.values())
        return False

    def _let_in(self, member: int) -> None:
        self._arriving.discard(member)
        self._joined.add(member)
        if member in self._spares:
            self._spares.discard(member)
            self._num_missing -= 1
        self._log.post(Event(kind=EventKind.JOINED, member=member))

    def leave(self, member: int) -> None:
        """Let a member go at the end of a step; the others go on with what it had."""
        self._log.post(Event(kind=EventKind.LEAVES, member=member))

    @property
    def running(self) -> list[int]:
        """The members whose processes run."""
        return [member for member, own in self.processes.items() if own.poll() is None]

    def _resize(self) -> None:
        """Come closer to the size that ranks asked for: one process at a time."""
        if self.store.check(["resize"]):
            self._size = int(self.store.get("resize"))
        running = [member for member in self.running if member not in self._spares]
        if self._leaving in running or self._arriving - self._spares or self._size is None:
            return
        self._leaving = None
        if any(not self._has_entered(member) for member in running):
            return
        if 0 < len(running) < self._size:
            self.join()
        elif len(running) > self._size:
            self._leaving = max(running)
            self.leave(self._leaving)

    def _has_entered(self, member: int) -> bool:
        """Whether a member trains, and does not only wait for the others to let it in."""
        return member not in (self._arriving | self._joined) or self.store.check(
            [f"entered/{member}"]
        )

    def _start(self, member: int, *, joins: bool) -> None:
        address = StoreAddress(host=_HOST, port=self._port, prefix="survive")
        alone_at = self._port_apart if joins else None
        variables = of_member(member, self._num_ranks, address, alone_at=alone_at)
        self.processes[member] = self._start_process(member, variables)


def _serve() -> tuple[dist.TCPStore, int]:
    """A store that listens on this machine alone; torch's own socket would listen everywhere."""
    with socket.create_server((_HOST, 0)) as listening:
        port = listening.getsockname()[1]
        descriptor = listening.detach()
    store = dist.TCPStore(
        _HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )
    return store, port


def end_processes(processes: Iterable[RankProcess]) -> None:
    """End what still runs: asked first, then killed; with what they have started."""
    processes = list(processes)
    for numbers, patience_s in (
        # A stopped process takes no signal but SIGKILL before it is let go on.
        ((signal.SIGTERM, signal.SIGCONT), _GRACE_S),
        ((signal.SIGKILL,), _KILLED_S),
    ):
        running = [own for own in processes if own.poll() is None]
        for own, number in itertools.product(running, numbers):
            _signal(own.pid, number)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and any(own.poll() is None for own in running):
            time.sleep(_POLL_S)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(PermissionError):
        try:
            os.killpg(pid, number)
        except ProcessLookupError:  # it has not come so far as to make a session
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def run_job(start: Start, num_ranks: int, num_restarts: int, num_spares: int = 0) -> list[int]:
    """Run a job to its end; returns the members that died in its last start."""
    for restart in itertools.count(1):
        try:
            with Launcher(start, num_ranks, num_spares=num_spares) as launcher:
                return launcher.wait()
        except LostStateError as error:
            if restart > num_restarts:
                raise
            print(
                f"{error}: starting all ranks again, {restart} of at most {num_restarts} times",
                file=sys.stderr,
            )
    raise AssertionError("unreachable")
