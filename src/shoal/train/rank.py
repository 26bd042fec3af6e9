"""One rank of a run, from its place in the environment to its exit status.

`run_rank` is what both ways into a rank share: torchrun starts `shoal train` once per rank,
and shoal's own launcher calls `main` in a new process.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from shoal.checkpoint.disk import disk_errors
from shoal.errors import EXIT_INTERRUPTED, InvariantError, RankError
from shoal.files import replace
from shoal.train import environment
from shoal.train.config import ParallelConfig
from shoal.train.environment import Place
from shoal.train.failure import SHARED_ERRORS, leave_word, reporting_failure
from shoal.train.job import TrainJob
from shoal.train.launch import stop_signals
from shoal.train.loop import train
from shoal.train.run_folder import RunFolder
from shoal.train.safe_stream import SafeStream, say
from shoal.train.text.token_file import PROGRESS_S, in_turns
from shoal.train.world import World, join_world
from shoal.watch import Watchdog

_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_S = 0.5
_HEAD_START_S = 5.0


def run_rank(
    place: Place, job: TrainJob, *, create: bool, signals: Sequence[signal.Signals]
) -> int:
    """Train as the rank at `place` and return the exit status.

    With `create` nobody has made the run folder yet: rank 0 does, and its job is everyone's.
    Any of `signals` asks the run to stop.
    """
    # What was imported stays: collections that look through it take a tenth of a compilation.
    gc.freeze()
    parallel = job.config.parallel
    _use_threads(parallel, place)
    asked = threading.Event()
    with (
        reporting_failure(),
        stop_signals(signals, ask=asked.set, insist=_die_of),
        ExitStack() as held,
        _forecast_of(job, place) as foreseen,
        join_world(place, parallel.device, replicas=parallel.replicas) as world,
    ):
        if create:
            _make_tokens(job, world)
            job = world.share(partial(_create_or_rejoin, job, world.size, held))
        elif environment.restarts().count:
            job = world.share(job.after_restart)
        if foreseen is not None:
            with disk_errors("write", job.folder.forecast):
                replace(job.folder.forecast, json.dumps(foreseen).encode()).close()
        stop_request = job.folder.stop_request
        finished = train(
            job,
            world,
            lambda: asked.is_set() or stop_request.exists(),
            watch=partial(_watchdog, job),
        )
    return 0 if finished else EXIT_INTERRUPTED


@contextmanager
def _forecast_of(job: TrainJob, place: Place) -> Iterator[dict[str, Any] | None]:
    """What the run will need, by rank 0, before there is a process group."""
    asked, device = job.config.run.forecast, job.config.parallel.device
    on_cuda = device != "cpu" and torch.cuda.is_available()
    if place.rank or asked == "off" or (asked == "auto" and not on_cuda):
        yield None
        return
    from shoal.train.foresight import foresee

    yield foresee(job.config, world=place.world_size)


def main(argv: Sequence[str]) -> NoReturn:
    """Run as a rank of shoal's own launcher; errors go to the log and to the launcher.

    `argv` is the run folder, the launcher's process id, and the checkpoint to start from, if any.
    """
    # Where this rank was when it crashed, or was ended because another had failed.
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, chain=True)
    folder, launcher = RunFolder(Path(argv[0])), int(argv[1])
    _end_with_launcher(launcher)
    try:
        place = environment.place()
        if place is None:
            raise InvariantError("a launched rank found no RANK in its environment")
        job = TrainJob.reopen(folder, Path(argv[2]) if argv[2:] else None)
        # Not SIGTERM: with it the launcher ends ranks that may hang in a collective for good.
        status = run_rank(place, job, create=False, signals=[signal.SIGINT, signal.SIGHUP])
    except Exception:
        traceback.print_exc()
        status = 1
    exit_now(status)


def exit_now(status: int) -> NoReturn:
    """End this process past the interpreter's shutdown.

    A gloo thread that gives back the tensors of the last collective needs the interpreter's
    lock, and aborts the process if the interpreter is being shut down meanwhile: seen once in 25
    runs that had gone well. After an error the process group might also wait for ranks that are
    gone.
    """
    for stream in (sys.stdout, sys.stderr):
        SafeStream(stream).flush()
    os._exit(status)


def _make_tokens(job: TrainJob, world: World) -> None:
    """Let rank 0 read the text; the others hear of it as it goes, so that nobody waits for long."""
    turns = in_turns(job.make_tokens(), PROGRESS_S) if world.leads else iter(())
    while (progress := world.share(lambda: next(turns, None))) is not None:
        if world.leads:
            say(f"reading the text: {progress}", stream=sys.stdout)


def _create_or_rejoin(job: TrainJob, num_ranks: int, held: ExitStack) -> TrainJob:
    held.enter_context(job.folder.locked())
    is_restart = environment.restarts().count > 0 and job.folder.config.exists()
    if is_restart or job.folder.belongs_to(environment.job_id()):
        return job.after_restart()
    job.create(num_ranks=num_ranks)
    return job


def _end_with_launcher(launcher: int) -> None:
    """End this process when the launcher is gone, however it went."""
    if sys.platform == "linux":
        # The kernel does it at once, whatever this process is stuck in.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    # Elsewhere, and if the launcher went before this line.
    def wait_for_its_end() -> None:
        while os.getppid() == launcher:
            time.sleep(_PARENT_CHECK_S)
        os._exit(1)

    threading.Thread(target=wait_for_its_end, name="follow-launcher", daemon=True).start()


def _use_threads(config: ParallelConfig, place: Place) -> None:
    """Share the cores of this machine out to its ranks."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    elif not environment.threads_are_set():
        torch.set_num_threads(max(1, _num_cores() // place.local_world_size))


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _watchdog(job: TrainJob) -> AbstractContextManager[object]:
    """End this rank when it waits for others for longer than the job's config allows."""
    limit_s = job.config.faults.stall_limit
    if not limit_s:
        return nullcontext()
    survive = job.config.faults.survive
    return Watchdog(
        # The launcher ends a rank that stands still before, and the others go on without it.
        limit_s=limit_s + _HEAD_START_S * survive,
        folder=job.folder.logs,
        end=_end_stalled,
        alike=SHARED_ERRORS,
        survive=survive,
    )


def _end_stalled(verdict: str) -> None:
    """Leave word for the launcher and end: the main thread may never come back to do it."""
    leave_word(RankError(verdict))
    say(f"shoal: error: {verdict}", stream=sys.stderr)
    os._exit(1)


def _die_of(number: signal.Signals) -> NoReturn:
    """End this process as if it had never handled the signal."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    raise AssertionError(f"{number.name} did not end the process")
