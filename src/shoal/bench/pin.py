"""Keeps a process on one core, so that host-bound figures repeat.

Forward runs in one thread and backward in another, never at the same time. On two cores each finds
the other's Python objects in a cold cache: on an H200's host FSDP2's step was seen to take 20 to
50 % longer then, and to vary as much from step to step. All engines are pinned alike.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path


def pin_to_one_core() -> None:
    """Move all threads of this process, and those to come, to the last core it may use."""
    if sys.platform != "linux":
        return
    core = max(os.sched_getaffinity(0))
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # a thread may end while we look
            os.sched_setaffinity(int(task.name), {core})
