"""Keeps processes on one core, so that host-bound figures repeat.

Forward runs in one thread and backward in another, never at the same time. On two cores each finds
the other's Python objects in a cold cache: on an H200's host FSDP2's step was seen to take 20 to
50 % longer then, and to vary as much from step to step. Cores also differ, where a neighbour on the
same machine keeps one busy: by a third, on that host. The fastest is looked for before each round,
and all engines have their turn of the round on it.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from time import perf_counter


def fastest_core() -> int | None:
    """The core on which Python runs the fastest at the moment; None where none can be chosen."""
    if sys.platform != "linux":
        return None
    cores = os.sched_getaffinity(0)
    try:
        probes_ms = {core: _probe_ms(core) for core in cores}
    finally:
        os.sched_setaffinity(0, cores)
    return min(probes_ms, key=probes_ms.__getitem__)


def stay_on(core: int) -> float:
    """Move all threads of this process, and those to come, to a core.

    Return how long a little Python took there, in ms.
    """
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # a thread may end while we look
            os.sched_setaffinity(int(task.name), {core})
    return _probe_ms(core)


def _probe_ms(core: int) -> float:
    """How long a little Python takes on a core; the calling thread stays there."""
    os.sched_setaffinity(0, {core})
    times_ms: list[float] = []
    for _ in range(3):
        start = perf_counter()
        sum(number * number for number in range(20_000))
        times_ms.append((perf_counter() - start) * 1e3)
    return min(times_ms)
