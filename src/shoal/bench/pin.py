"""Keeps a process on one core, so that host-bound figures repeat.

Forward runs in one thread and backward in another, never at the same time. On two cores each finds
the other's Python objects in a cold cache: on an H200's host FSDP2's step was seen to take 20 to
50 % longer then, and to vary as much from step to step. Cores also differ, where a neighbour on the
same machine keeps one busy; the fastest is looked for before each round. All engines are treated
alike.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from time import perf_counter


class Pin:
    """Where this process runs; `renew` moves it."""

    def __init__(self) -> None:
        self._cores = os.sched_getaffinity(0) if sys.platform == "linux" else set()

    def renew(self) -> float | None:
        """Move all threads, and those to come, to the core that is the fastest at the moment.

        Return how long a little Python took there, in ms.
        """
        if not self._cores:
            return None
        probes_ms = {core: _probe_ms(core) for core in self._cores}
        core = min(probes_ms, key=probes_ms.__getitem__)
        for task in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):  # a thread may end while we look
                os.sched_setaffinity(int(task.name), {core})
        return probes_ms[core]


def _probe_ms(core: int) -> float:
    """How long a little Python takes on a core; the calling thread stays there."""
    os.sched_setaffinity(0, {core})
    times_ms: list[float] = []
    for _ in range(3):
        start = perf_counter()
        sum(number * number for number in range(20_000))
        times_ms.append((perf_counter() - start) * 1e3)
    return min(times_ms)
