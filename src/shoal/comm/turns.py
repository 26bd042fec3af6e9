"""Taking turns: of the threads that stand for ranks, exactly one runs.

A rank runs until it must wait for another one, says what for, and gives the turn to the next rank
that can go on. So runs repeat exactly, process-wide state needs no locks, every rank can have its
own random generators, and a deadlock is seen at once: nobody can go on. A rank that waits for a key
of the store lets the others run, too.
"""

from __future__ import annotations

import random
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import Store

from shoal.errors import InvariantError, RankError


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """What torch, numpy and Python will draw next."""

    torch_cpu: Tensor
    torch_cuda: tuple[Tensor, ...]
    numpy: Any
    python: Any

    @classmethod
    def capture(cls) -> RandomState:
        """Take the present state."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ()
        return cls(
            torch_cpu=torch.get_rng_state(),
            torch_cuda=tuple(cuda),
            numpy=np.random.get_state(),
            python=random.getstate(),
        )

    def restore(self) -> None:
        """Make this the present state."""
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda:
            torch.cuda.set_rng_state_all(self.torch_cuda)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


class Aborted(BaseException):
    """Unwinds a rank because another one failed; no `except Exception` should stop it."""


@dataclass(frozen=True, slots=True)
class _Wait:
    ready: Callable[[], bool]
    where: Callable[[], str]


class Turns:
    """Which rank runs, what each rank waits for, and the first error."""

    def __init__(self, num_ranks: int) -> None:
        self._turns = [threading.Semaphore(0) for _ in range(num_ranks)]
        self._running = 0
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
        """Abort from outside, because a rank has the turn and does not come back."""
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
                idle = "is running" if rank == self._running else "could go on"
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
        self._running = rank
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


Wait = Callable[[Callable[[], bool], Callable[[], str]], None]
"""Lets other ranks run until the first is true; the second says what this rank waits for."""


class LocalStore(Store):
    """One rank's view of keys that all ranks share."""

    def __init__(self, shared: dict[str, bytes], wait_until: Wait) -> None:
        super().__init__()
        self._shared = shared
        self._wait_until = wait_until

    def set(self, key: str, value: str | bytes) -> None:
        """Give a key a value."""
        self._shared[key] = _to_bytes(value)

    def get(self, key: str) -> bytes:
        """Wait for a key, and read it."""
        self.wait([key])
        return self._shared[key]

    def add(self, key: str, value: int) -> int:
        """Count, from 0 where the key is new."""
        total = int(self._shared.get(key, b"0")) + value
        self._shared[key] = str(total).encode()
        return total

    def append(self, key: str, value: str | bytes) -> None:
        """Lengthen a key's value."""
        self._shared[key] = self._shared.get(key, b"") + _to_bytes(value)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return all(key in self._shared for key in keys)

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Set a key only if it has the expected value, or has none and none is expected."""
        present = self._shared.get(key, b"")
        if present == _to_bytes(expected_value):
            present = self._shared[key] = _to_bytes(desired_value)
        return present or _to_bytes(expected_value)

    def delete_key(self, key: str) -> bool:
        """Forget a key; whether it was there."""
        return self._shared.pop(key, None) is not None

    def num_keys(self) -> int:
        """How many keys there are."""
        return len(self._shared)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Let others run until all keys are there."""
        self._wait_until(
            lambda: self.check(keys), lambda: f"waits for the store to hold {', '.join(keys)}"
        )


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
