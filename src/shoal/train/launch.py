"""The launcher of one machine: starts the ranks of a job, waits for them, decides what follows.

    start ──┬── all ranks finished         the run is over
      ▲     ├── all ranks stopped          as they were asked to: exit code 130
      │     ├── a second Ctrl-C            the ranks are ended at once
      │     ├── the run folder is gone     the ranks are ended, nothing more is written
      └─────┴── a rank was lost            the others are ended; all start again, or one error

Ranks meet through a file in a folder that only this user can open, and talk over loopback: nothing
listens where another machine could connect, and the launcher reads nothing but exit statuses and
JSON.

The first Ctrl-C asks: the step in progress ends, a checkpoint is written. Shells, `make`,
`timeout` and launchers all pass signals on, so the same Ctrl-C can arrive several times; only
one that comes clearly later insists.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum, auto
from pathlib import Path
from types import FrameType
from typing import Self

from shoal.checkpoint.disk import disk_errors
from shoal.errors import EXIT_INTERRUPTED
from shoal.files import create
from shoal.train import environment
from shoal.train.failure import SHARED_ERRORS, RankEnd, as_error, log_of, read_reply, resume_advice
from shoal.train.job import TrainJob
from shoal.train.run_folder import RunFolder
from shoal.train.safe_stream import say

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a scheduler or `kill`, a terminal that was closed: each asks a run to stop."""

ECHO_S = 2.0
"""Within this time a further signal is an echo of the first."""

_POLL_S = 0.05
_FOLDER_CHECK_S = 0.5
_GRACE_S = 1.0
"""How long a rank may take to end after SIGTERM; it only writes its stacks into its log."""
_STOPPED_S = 1.5
"""How long past the stall limit a rank may stand still; the ranks' own verdict comes before."""
_KILLED_S = 10.0
"""How long after SIGKILL a process is waited for: one in the kernel's hands may stay longer."""

# Ranks import from where the launcher does: `python -m` would look into the working folder first.
_RANK_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from shoal.train.rank import main; main(sys.argv[1:])"
)


class _Outcome(Enum):
    """Why one start of the ranks ended: `LOST` is a lost rank, or a lost run folder."""

    FINISHED = auto()
    LOST = auto()
    INSISTED = auto()


def launch(job: TrainJob) -> int:
    """Run a created job on its own ranks; return the exit status or raise what a rank raised."""
    plural = "s" if job.num_ranks != 1 else ""
    say(f"launching {job.num_ranks} rank{plural}; Ctrl-C saves and stops", stream=sys.stdout)
    folder, limit = job.folder, job.config.faults.max_restarts
    home = folder.path.stat()
    # What is imported by now stays until the end: the interpreter would look at all of it once
    # more when it exits, for most of a second, while a scheduler waits for the job's status.
    gc.freeze()
    parent = Path(tempfile.gettempdir())
    with disk_errors("make a folder in", parent):  # not in the run's, whose disk may be full
        private_folder = tempfile.TemporaryDirectory(
            prefix="shoal-", dir=parent, ignore_cleanup_errors=True
        )
    with private_folder as private, _stop_requests(folder) as insisted:
        for restart in itertools.count():
            with RankProcesses(job, Path(private), restart=restart) as ranks:
                outcome = _wait(ranks, folder, home, insisted)
            if outcome is _Outcome.FINISHED:
                return EXIT_INTERRUPTED if ranks.were_interrupted else 0
            if outcome is _Outcome.INSISTED:
                say(f"stopped at once. {resume_advice(folder)}", stream=sys.stderr)
                return EXIT_INTERRUPTED
            if folder.is_lost(home):  # which a rank may have been lost of
                folder.drop_remains(home)
                raise folder.lost_error()
            error = as_error(ranks.ends, folder, restart=restart)
            if restart == limit or isinstance(error, SHARED_ERRORS):
                raise error
            what = str(error).partition("\n")[0]
            again = f"starting all ranks again, {restart + 1} of at most {limit} times"
            say(f"{what}; {again}", stream=sys.stdout)
    raise AssertionError("unreachable")


def _wait(
    ranks: RankProcesses, folder: RunFolder, home: os.stat_result, insisted: threading.Event
) -> _Outcome:
    """Wait until something happens that ends this start of the ranks.

    Here it is decided what the death of a rank means: today it ends the start for all.
    """
    look_at = 0.0
    while True:
        if insisted.is_set():
            return _Outcome.INSISTED
        if ranks.poll() or ranks.stand_still:
            return _Outcome.LOST
        if not ranks.running:
            return _Outcome.FINISHED
        if time.monotonic() > look_at:
            look_at = time.monotonic() + _FOLDER_CHECK_S
            if folder.is_lost(home):
                return _Outcome.LOST
        time.sleep(_POLL_S)


class RankProcesses:
    """The processes of one start of a job; ended for sure when the `with` block is left.

    Rank 0's stdout stays the terminal's, all else goes into files: native code of torch warns at
    length on stderr when a rank dies, and the launcher tells the same in one message.
    """

    def __init__(self, job: TrainJob, private: Path, *, restart: int) -> None:
        self._job = job
        self._restart = restart
        self._meeting = private / str(restart)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._lost: set[int] = set()
        self._stopped: set[int] = set()
        self._stopped_at: dict[int, float] = {}

    def __enter__(self) -> Self:
        try:
            with disk_errors("make", self._meeting):
                self._meeting.mkdir(mode=0o700)
                os.close(os.open(self._store, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            for rank in range(self._job.num_ranks):
                self._processes[rank] = self._start(rank)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def running(self) -> Mapping[int, subprocess.Popen[bytes]]:
        """The processes that have not ended, by rank."""
        return {rank: own for rank, own in self._processes.items() if own.poll() is None}

    @property
    def were_interrupted(self) -> bool:
        """Whether the ranks stopped before the last step, as they were asked to."""
        return any(own.returncode == EXIT_INTERRUPTED for own in self._processes.values())

    @property
    def ends(self) -> list[RankEnd]:
        """How each rank ended."""
        return [
            RankEnd(
                rank=rank,
                pid=own.pid,
                status=own.returncode if own.returncode is not None else -signal.SIGKILL,
                reply=read_reply(self._reply(rank)),
                is_lost=rank in self._lost,
                was_stopped=rank in self._stopped,
            )
            for rank, own in self._processes.items()
        ]

    def poll(self) -> bool:
        """Tell whether a rank was lost: it ended without having finished, or having been asked."""
        if self._find_lost():
            # Another may have died before it, and just after it was looked at.
            self._lost = self._find_lost()
        return bool(self._lost)

    @property
    def stand_still(self) -> bool:
        """Whether a rank is stopped for longer than the limit; the others may not watch it yet."""
        limit_s, now = self._job.config.faults.stall_limit, time.monotonic()
        self._stopped_at = {
            rank: self._stopped_at.get(rank, now)
            for rank, own in self.running.items()
            if _is_stopped(own.pid)
        }
        longest_s = now - min(self._stopped_at.values(), default=now)
        return limit_s > 0 and longest_s > limit_s + _STOPPED_S

    def _end(self) -> None:
        """End the processes that still run; none of them counts as lost, whatever it dies of."""
        self._stopped = {rank for rank, own in self.running.items() if _is_stopped(own.pid)}
        for numbers, patience_s in (
            # A stopped process takes no signal but SIGKILL before it is let go on.
            ((signal.SIGTERM, signal.SIGCONT), _GRACE_S),
            ((signal.SIGKILL,), _KILLED_S),
        ):
            running = self.running
            for own in running.values():
                for number in numbers:
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(own.pid, number)
            deadline = time.monotonic() + patience_s
            for own in running.values():
                with suppress(subprocess.TimeoutExpired):
                    own.wait(max(0.0, deadline - time.monotonic()))

    def _find_lost(self) -> set[int]:
        fine = (None, 0, EXIT_INTERRUPTED)
        return {rank for rank, own in self._processes.items() if own.poll() not in fine}

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        job, logs = self._job, self._job.folder.logs
        program = [sys.executable, "-u", "-c", _RANK_PROGRAM.format(path=sys.path)]
        checkpoint = [] if job.checkpoint is None else [str(job.checkpoint)]
        limit = job.config.faults.max_restarts
        with disk_errors(f"start rank {rank} with its log in", logs), ExitStack() as files:
            out = files.enter_context(create(logs / f"rank-{rank}.out")) if rank else None
            log = log_of(rank, logs, restart=self._restart)
            return subprocess.Popen(
                [*program, str(job.folder.path), str(os.getpid()), *checkpoint],
                env=environment.of_rank(
                    rank,
                    job.num_ranks,
                    store=self._store,
                    reply=self._reply(rank),
                    restarts=environment.Restarts(count=self._restart, limit=limit),
                ),
                stdout=out,
                stderr=files.enter_context(create(log)),
                # A session of its own: the terminal's Ctrl-C is for the launcher, and what the
                # rank starts (compilers) can be ended with it.
                start_new_session=True,
            )

    @property
    def _store(self) -> Path:
        return self._meeting / "store"

    def _reply(self, rank: int) -> Path:
        return self._meeting / f"rank-{rank}.json"


def _is_stopped(pid: int) -> bool:
    """Tell whether a child stands still: SIGSTOP, or SIGTSTP from a terminal."""
    if not hasattr(os, "waitid"):
        return False
    try:
        found = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except OSError:
        return False
    return found is not None


@contextmanager
def _stop_requests(folder: RunFolder) -> Iterator[threading.Event]:
    """Turn the first signal into a request that the ranks see; a later one sets the event."""
    insisted = threading.Event()

    def ask() -> None:
        path = folder.stop_request
        try:
            create(path).close()
        except OSError as error:
            say(
                f"cannot ask the ranks to stop through {path}: {error.strerror}; "
                f"Ctrl-C again quits at once",
                stream=sys.stderr,
            )
            return
        say("stopping after this step, then saving; Ctrl-C again quits at once", stream=sys.stderr)

    try:
        with stop_signals(STOP_SIGNALS, ask=ask, insist=lambda number: insisted.set()):
            yield insisted
    finally:
        with suppress(OSError):
            folder.stop_request.unlink()


@contextmanager
def stop_signals(
    signals: Sequence[signal.Signals],
    *,
    ask: Callable[[], None],
    insist: Callable[[signal.Signals], None],
) -> Iterator[None]:
    """Call `ask` on the first of `signals`, `insist` on one that comes clearly later."""
    asked_at: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        if asked_at is None:
            asked_at = time.monotonic()
            ask()
        elif time.monotonic() - asked_at > ECHO_S:
            insist(signal.Signals(number))

    previous = {
        number: signal.signal(number, handle)
        for number in signals
        # `nohup` ignores SIGHUP on behalf of a run that shall outlive its terminal.
        if not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
