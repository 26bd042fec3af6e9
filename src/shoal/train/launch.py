"""The launcher of one machine: starts the ranks of a job, waits for them, decides what follows.

    start ──┬── all ranks finished         the run is over
      ▲     ├── all ranks stopped          as they were asked to: exit code 130
      │     ├── a second Ctrl-C            the ranks are ended at once
      │     ├── the run folder is gone     the ranks are ended, nothing more is written
      └─────┴── a rank was lost            the others are ended; all start again, or one error

Ranks meet through a file in a folder that only this user can open, and talk over loopback: nothing
listens where another machine could connect, and the launcher reads nothing but exit statuses and
JSON. With `--survive` they meet in a store of the launcher's, which listens on loopback too: a lost
rank is told to the others, which go on.

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
from shoal.errors import EXIT_INTERRUPTED, RankError
from shoal.files import create
from shoal.survive.launcher import Launcher, LostStateError, end_processes
from shoal.train import environment
from shoal.train.failure import (
    SHARED_ERRORS,
    RankEnd,
    as_error,
    how_it_died,
    log_of,
    read_reply,
    resume_advice,
)
from shoal.train.job import TrainJob
from shoal.train.run_folder import RunFolder
from shoal.train.safe_stream import say

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a scheduler or `kill`, a terminal that was closed: each asks a run to stop."""

ECHO_S = 2.0
"""Within this time a further signal is an echo of the first."""

_POLL_S = 0.05
_FOLDER_CHECK_S = 0.5
_FINE = (0, EXIT_INTERRUPTED)
"""Statuses of ranks that have finished, or stopped as they were asked to."""
_STOPPED_S = 1.5
"""How long past the stall limit a rank may stand still; the ranks' own verdict comes before."""

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
            error = as_error(ranks.ends, folder, restart=restart, why=ranks.why)
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

    Here it is decided what the death of a rank means: the end for all, unless they survive it.
    """
    look_at = 0.0
    while True:
        if insisted.is_set():
            return _Outcome.INSISTED
        if ranks.poll() or (ranks.stand_still and not ranks.end_those_that_stand()):
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
        self._survivors: Launcher | None = None
        if job.config.faults.survive:
            self._survivors = Launcher(self._start, job.num_ranks, fine=_FINE)
        self.why = ""
        """What the loss of ranks means, if it is more than that."""
        self._num_told = 0
        self._lost: set[int] = set()
        self._stopped: set[int] = set()
        self._stopped_at: dict[int, float] = {}

    def __enter__(self) -> Self:
        try:
            with disk_errors("make", self._meeting):
                self._meeting.mkdir(mode=0o700)
                os.close(os.open(self._store, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            if self._survivors is not None:
                self._survivors.__enter__()
                return self
            for rank in range(self._job.num_ranks):
                self._start(rank, environment.meeting_in(self._store))
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
        """Tell whether a rank was lost: it ended without having finished, or having been asked.

        One that died of a signal is not, where the others survive it.
        """
        if self._survivors is not None:
            return self._poll_survivors(self._survivors)
        if self._find_lost():
            # Another may have died before it, and just after it was looked at.
            self._lost = self._find_lost()
        return bool(self._lost)

    def _poll_survivors(self, survivors: Launcher) -> bool:
        try:
            survivors.poll()
        except RankError as error:
            self._lost = self._find_lost()
            self.why = f"{error}\n" if isinstance(error, LostStateError) else ""
        for member in survivors.lost[self._num_told :]:
            ended = next(ended for ended in self.ends if ended.rank == member)
            others = f"; the other {len(self.running)} go on" if not self._lost else ""
            say(f"{ended} {how_it_died(ended)}{others}", stream=sys.stdout)
        self._num_told = len(survivors.lost)
        return bool(self._lost)

    def end_those_that_stand(self) -> bool:
        """Let ranks that stand still die, where the others can go on without; tells whether so."""
        if self._survivors is None:
            return False
        for rank in self._stopped_at:
            with suppress(ProcessLookupError):
                os.killpg(self._processes[rank].pid, signal.SIGKILL)
        return True

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
        end_processes(self._processes.values())

    def _find_lost(self) -> set[int]:
        fine = (None, *_FINE)
        return {rank for rank, own in self._processes.items() if own.poll() not in fine}

    def _start(self, rank: int, meeting: Mapping[str, str]) -> subprocess.Popen[bytes]:
        job, logs = self._job, self._job.folder.logs
        survives = self._survivors is not None
        program = [sys.executable, "-u", "-c", _RANK_PROGRAM.format(path=sys.path)]
        checkpoint = [] if job.checkpoint is None else [str(job.checkpoint)]
        limit = job.config.faults.max_restarts
        with disk_errors(f"start rank {rank} with its log in", logs), ExitStack() as files:
            out = files.enter_context(create(logs / f"rank-{rank}.out")) if rank else None
            log = log_of(rank, logs, restart=self._restart)
            terminal = os.dup(1) if survives else None  # for whoever leads
            if terminal is not None:
                files.callback(os.close, terminal)
                meeting = {**meeting, **environment.showing_on(terminal)}
            self._processes[rank] = subprocess.Popen(
                [*program, str(job.folder.path), str(os.getpid()), *checkpoint],
                env=environment.of_rank(
                    rank,
                    job.num_ranks,
                    meeting=meeting,
                    reply=self._reply(rank),
                    restarts=environment.Restarts(count=self._restart, limit=limit),
                ),
                stdout=out,
                stderr=files.enter_context(create(log)),
                # A session of its own: the terminal's Ctrl-C is for the launcher, and what the
                # rank starts (compilers) can be ended with it.
                start_new_session=True,
                pass_fds=() if terminal is None else (terminal,),
            )
        return self._processes[rank]

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
