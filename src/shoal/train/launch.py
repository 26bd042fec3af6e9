"""Launching the ranks of a job on this machine, through torch's elastic launcher."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shoal.checkpoint.disk import disk_errors
from shoal.errors import EXIT_INTERRUPTED
from shoal.train.failure import as_error, last_words, log_of, shared_error, was_interrupted
from shoal.train.folder import RunFolder
from shoal.train.job import Job
from shoal.train.outlet import say
from shoal.train.signals import STOP_SIGNALS, stop_signals

_LOOPBACK = "127.0.0.1"
_MONITOR_S = 0.1


class RankLogs(LogsSpecs):
    """Where ranks write: rank 0's stdout stays the terminal's, all else goes into files.

    Native code of torch warns on stderr at length when a rank dies; the launcher tells the
    same in one message. Ranks that are started again have files of their own.
    """

    def __init__(self, folder: Path, replies: Path) -> None:
        super().__init__(log_dir=str(folder))
        self._folder = folder
        self._replies = replies
        self.restart = 0

    @property
    def root_log_dir(self) -> str:
        """The folder of the files."""
        return str(self._folder)

    @property
    def replies(self) -> Path:
        """Where the ranks of the last start say why they failed."""
        return self._replies / str(self.restart)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Name the files of each local rank; the agent asks at each start."""
        self.restart = int(envs[0]["TORCHELASTIC_RESTART_COUNT"])
        self.replies.mkdir()
        error_files = {rank: str(self.replies / f"rank-{rank}.json") for rank in envs}
        for rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = error_files[rank]
        return LogsDest(
            stdouts={rank: str(self._folder / f"rank-{rank}.out") if rank else "" for rank in envs},
            stderrs={rank: str(log_of(rank, self._folder, restart=self.restart)) for rank in envs},
            error_files=error_files,
        )


def launch(job: Job) -> int:
    """Run a created job on its own ranks; return the exit status or raise what a rank raised."""
    plural = "s" if job.num_ranks != 1 else ""
    say(f"launching {job.num_ranks} rank{plural}; Ctrl-C saves and stops", stream=sys.stdout)
    folder = job.folder
    with (
        _reply_folder() as replies,
        _elastic_logs_in(folder.logs / "launcher.log"),
        _stop_requests(folder),
    ):
        logs = RankLogs(folder.logs, replies)
        try:
            elastic_launch(_launch_config(job, logs), sys.executable)(*_arguments(job))
        except ChildFailedError as error:
            if was_interrupted(error.failures):
                return EXIT_INTERRUPTED
            raise as_error(error.failures, folder, restart=logs.restart) from None
        except SignalException:
            say(f"stopped at once. {last_words(folder)}", stream=sys.stderr)
            return EXIT_INTERRUPTED
        finally:
            folder.stop_request.unlink(missing_ok=True)
        error = shared_error(logs.replies)
        if error is not None:
            raise error
    return EXIT_INTERRUPTED if folder.stopped.exists() else 0


def _launch_config(job: Job, logs: RankLogs) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.num_ranks,
        logs_specs=logs,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{_LOOPBACK}:0",
        local_addr=_LOOPBACK,
        max_restarts=job.config.faults.max_restarts,
        monitor_interval=_MONITOR_S,
        # The signals that ask a run to stop are ours: the agent would end the ranks on them.
        signals_to_handle="SIGQUIT",
    )


def _arguments(job: Job) -> list[str]:
    """How Python is told to be a rank of the job."""
    checkpoint = [] if job.checkpoint is None else [str(job.checkpoint)]
    return ["-u", "-m", "shoal.train.rank", str(job.folder.path), str(os.getpid()), *checkpoint]


@contextmanager
def _reply_folder() -> Iterator[Path]:
    """Make a folder for why ranks failed: not in the run's, whose disk may be full."""
    parent = Path(tempfile.gettempdir())
    with disk_errors("make a folder in", parent):
        folder = Path(tempfile.mkdtemp(prefix="shoal-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _stop_requests(folder: RunFolder) -> Iterator[None]:
    """Turn the first signal into a request that the ranks see, a later one into the end."""

    def ask() -> None:
        try:
            folder.stop_request.touch()
        except OSError as error:
            say(
                f"cannot ask the ranks to stop through {folder.stop_request}: {error.strerror}; "
                f"Ctrl-C again quits at once",
                stream=sys.stderr,
            )
            return
        say("stopping after this step, then saving; Ctrl-C again quits at once", stream=sys.stderr)

    def insist(number: signal.Signals) -> NoReturn:
        # The agent takes this for its own handler's, and passes the signal on: SIGTERM, because
        # SIGINT would only ask the ranks once more.
        raise SignalException(f"got {number.name} again", signal.SIGTERM)

    with stop_signals(STOP_SIGNALS, ask=ask, insist=insist):
        yield


class _LogFile(logging.FileHandler):
    """A log that can do without what the disk does not take."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Say nothing: what fills the disk will be told by whoever needs it."""


@contextmanager
def _elastic_logs_in(path: Path) -> Iterator[None]:
    """Send what torch's launcher logs to a file instead of the terminal."""
    logger = logging.getLogger("torch.distributed")
    with disk_errors("write", path):
        handler = _LogFile(path, mode="w")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    # Torch gives this logger a handler of its own, which writes to stderr.
    handlers, propagate = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        with suppress(OSError):
            handler.close()
