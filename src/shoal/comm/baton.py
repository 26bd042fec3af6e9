"""Taking turns: of the threads that stand for ranks, exactly one runs.

A rank runs until it must wait for another one, says what for, and passes the baton to the next
rank that can go on. So runs repeat exactly, process-wide state needs no locks, every rank can have
its own random generators, and a deadlock is seen at once: nobody can go on.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from shoal.comm.random_state import RandomState
from shoal.errors import InvariantError, RankError


class Aborted(BaseException):
    """Unwinds a rank because another one failed; no `except Exception` should stop it."""


@dataclass(frozen=True, slots=True)
class _Wait:
    ready: Callable[[], bool]
    where: Callable[[], str]


class Baton:
    """Who runs, who waits for what, and what went wrong first."""

    def __init__(self, num_ranks: int) -> None:
        self._turns = [threading.Semaphore(0) for _ in range(num_ranks)]
        self._holder = 0
        self._threads: dict[int, int] = {}
        self._waits: dict[int, _Wait] = {}
        self._random = dict.fromkeys(range(num_ranks), RandomState.capture())
        self._ended: set[int] = set()
        self._all_ended = threading.Event()
        self.error: BaseException | None = None

    def start(self) -> None:
        """Let the first rank run; from outside, when every thread exists."""
        self._turns[0].release()

    def join(self, timeout_s: float) -> bool:
        """Wait, from outside, until every rank has ended; whether they did."""
        return self._all_ended.wait(timeout_s)

    def begin(self, rank: int) -> None:
        """Wait for this thread's first turn; its thread is rank `rank` from here on."""
        self._threads[rank] = threading.get_ident()
        self._take_turn(rank)

    def end(self, rank: int) -> None:
        """Leave, and let the others go on."""
        self._ended.add(rank)
        self._waits.pop(rank, None)
        if len(self._ended) == len(self._turns):
            self._all_ended.set()
        else:
            self._pass_on(rank)

    def wait_until(self, rank: int, ready: Callable[[], bool], where: Callable[[], str]) -> None:
        """Let others run until `ready`; `where` says what this rank waits for."""
        self.check_thread(rank)
        if self.error is not None:
            raise Aborted
        if ready():
            return
        self._waits[rank] = _Wait(ready, where)
        self._random[rank] = RandomState.capture()
        self._pass_on(rank)
        self._take_turn(rank)

    def abort(self, error: BaseException) -> None:
        """Make every rank unwind at its next wait; the first error is kept."""
        if self.error is None:
            self.error = error

    def expire(self, timeout_s: float) -> None:
        """Abort from outside, because a rank holds the baton and does not come back."""
        self.abort(
            RankError(
                f"the ranks did not finish within {timeout_s} s:\n{self.describe()}\n\n"
                f"{self.stacks()}"
            )
        )
        for turn in self._turns:
            turn.release()

    def check_thread(self, rank: int) -> None:
        """Refuse a collective from a thread that is not the rank."""
        if self._threads.get(rank) != threading.get_ident():
            raise InvariantError(
                f"thread {threading.current_thread().name!r} used a process group of rank {rank}: "
                "only the rank's own thread may, since it alone knows whose turn it is"
            )

    def describe(self) -> str:
        """Say for every rank where it is, one line each."""
        lines = []
        for rank in range(len(self._turns)):
            wait = self._waits.get(rank)
            if rank in self._ended:
                lines.append(f"rank {rank} has ended")
            else:
                idle = "is running" if rank == self._holder else "could go on"
                lines.append(f"rank {rank} {wait.where() if wait else idle}")
        return "\n".join(lines)

    def stacks(self) -> str:
        """The stack of every rank that has not ended."""
        frames = sys._current_frames()
        return "\n".join(
            f"stack of rank {rank}:\n{''.join(traceback.format_stack(frames[thread]))}"
            for rank, thread in sorted(self._threads.items())
            if rank not in self._ended and thread in frames
        )

    def _take_turn(self, rank: int) -> None:
        self._turns[rank].acquire()
        self._holder = rank
        self._waits.pop(rank, None)
        if self.error is not None:
            raise Aborted
        self._random[rank].restore()

    def _pass_on(self, rank: int) -> None:
        count = len(self._turns)
        order = [(rank + step) % count for step in range(1, count + 1)]
        alive = [other for other in order if other not in self._ended]
        following = next((other for other in alive if self._can_run(other)), None)
        if following is None:
            self.abort(RankError(f"no rank can go on:\n{self.describe()}"))
            following = alive[0]
        self._turns[following].release()

    def _can_run(self, rank: int) -> bool:
        wait = self._waits.get(rank)
        return self.error is not None or wait is None or wait.ready()
