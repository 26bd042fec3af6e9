"""A launcher whose ranks may die: it holds the store, and says who is gone.

    with Launcher(command(["train.py"]), num_ranks=4) as launcher:
        lost = launcher.wait()

A rank that dies of a signal is written into the log of events, and the others go on. One that ends
with an error ends the job, as everywhere.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, Self, TypeAlias

import torch.distributed as dist

from shoal.errors import RankError
from shoal.survive.environment import of_member
from shoal.survive.roster import Event, EventKind, EventLog

_POLL_S = 0.01
_GRACE_S = 2.0


FALLEN = "fallen"
"""Under this key ranks say that too many of them are lost."""


class LostStateError(RankError):
    """More ranks died than parity can rebuild: only a checkpoint has the state."""


class RankProcess(Protocol):
    """A process of a rank, such as a `subprocess.Popen`."""

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

    def start(_: int, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, *arguments], env={**os.environ, **variables}, start_new_session=True
        )

    return start


class Launcher:
    """The processes of a job, ended for sure when the `with` block is left."""

    def __init__(self, start: Start, num_ranks: int) -> None:
        self._start_process = start
        self._num_ranks = num_ranks
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._log = EventLog(self.store)
        self.processes: dict[int, RankProcess] = {}
        """By member; members are never used twice."""
        self.lost: list[int] = []
        """Members that died of signals, in order."""
        self._arriving: set[int] = set()
        self._joined: set[int] = set()
        self._leaving: int | None = None
        self._size: int | None = None
        self._is_over = False

    def __enter__(self) -> Self:
        try:
            for member in range(self._num_ranks):
                self._start(member, joins=False)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

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
                "for their state to be rebuilt from parity"
            )
        running = False
        for member, process in self.processes.items():
            status = process.poll()
            if status is None:
                running = True
            elif status > 0:
                if self.store.check([FALLEN]):
                    return self.poll()
                raise RankError(f"member {member} ended with status {status}, which ends the job")
            elif status < 0 and member not in self.lost and not self._is_over:
                self.lost.append(member)
                if member in self._arriving:
                    self._arriving.discard(member)  # nobody has heard of it
                else:
                    self._log.post(Event(kind=EventKind.LOST, member=member))
        for member in list(self._arriving):
            if self.store.check([f"arrivals/{member}"]):
                self._arriving.discard(member)
                self._joined.add(member)
                self._log.post(Event(kind=EventKind.JOINED, member=member))
        self._resize()
        if running and self._only_wait():
            self._is_over = True
            self._end()
            return False
        if not running and len(self.lost) == len(self.processes):
            raise LostStateError(f"all {len(self.lost)} ranks died: nobody is left to go on")
        return running

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
        running = self.running
        if self._leaving in running or self._arriving or self._size is None:
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

    def _only_wait(self) -> bool:
        """Whether those that still run came too late: the training is over."""
        return not any(self._has_entered(member) for member in self.running)

    def _start(self, member: int, *, joins: bool) -> None:
        variables = of_member(member, self._num_ranks, self.store.port, joins=joins)
        self.processes[member] = self._start_process(member, variables)

    def _end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            running = [own for own in self.processes.values() if own.poll() is None]
            for own in running:
                with suppress(ProcessLookupError):
                    os.kill(own.pid, number)
            deadline = time.monotonic() + _GRACE_S
            while time.monotonic() < deadline and any(own.poll() is None for own in running):
                time.sleep(_POLL_S)


def run_job(start: Start, num_ranks: int, num_restarts: int) -> list[int]:
    """Run a job to its end; returns the members that died in its last start."""
    for restart in itertools.count(1):
        try:
            with Launcher(start, num_ranks) as launcher:
                return launcher.wait()
        except LostStateError as error:
            if restart > num_restarts:
                raise
            print(
                f"{error}; starting all ranks again, from the last checkpoint of the program, "
                f"{restart} of at most {num_restarts} times",
                file=sys.stderr,
            )
    raise AssertionError("unreachable")
