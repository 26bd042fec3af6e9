"""The watchdog of a training run: it ends a rank that waits for others in vain."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext, suppress

from shoal.errors import RankError
from shoal.train import environment
from shoal.train.failure import SHARED, write_failure
from shoal.train.job import Job
from shoal.train.outlet import say
from shoal.watch import Watchdog


def watching(job: Job) -> AbstractContextManager[object]:
    """Watch the collectives of this rank, as the job's config says."""
    limit_s = job.config.faults.stall_limit
    if not limit_s:
        return nullcontext()
    return Watchdog(limit_s=limit_s, folder=job.folder.logs, end=_end, alike=SHARED)


def _end(verdict: str) -> None:
    """Leave word for the launcher and end: the main thread may never come back to do it."""
    path = environment.reply_file()
    if path is not None:
        with suppress(OSError):
            write_failure(path, RankError(verdict))
    say(f"shoal: error: {verdict}", stream=sys.stderr)
    os._exit(1)
