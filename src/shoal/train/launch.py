"""Launching the ranks of a job on this machine, through torch's elastic launcher."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shoal.checkpoint import latest
from shoal.errors import EXIT_INTERRUPTED
from shoal.train.failure import as_error, log_of, was_interrupted
from shoal.train.folder import RunFolder
from shoal.train.job import Job
from shoal.train.signals import stop_signals

_LOOPBACK = "127.0.0.1"
_MONITOR_S = 0.1


class RankLogs(LogsSpecs):
    """Where ranks write: rank 0's stdout stays the terminal's, all else goes into files.

    Native code of torch warns on stderr at length when a rank dies; the launcher tells the
    same in one message.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(log_dir=str(folder))
        self._folder = folder

    @property
    def root_log_dir(self) -> str:
        """The folder of the files."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Name the files of each local rank."""
        error_files = {rank: str(self._folder / f"rank-{rank}.json") for rank in envs}
        for rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = error_files[rank]
        return LogsDest(
            stdouts={rank: str(self._folder / f"rank-{rank}.out") if rank else "" for rank in envs},
            stderrs={rank: str(log_of(rank, self._folder)) for rank in envs},
            error_files=error_files,
        )


def launch(job: Job) -> int:
    """Run a created job on its own ranks; return the exit status or raise what a rank raised."""
    folder = job.folder
    for reply in folder.logs.glob("rank-*.json"):
        reply.unlink()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.num_ranks,
        logs_specs=RankLogs(folder.logs),
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{_LOOPBACK}:0",
        local_addr=_LOOPBACK,
        max_restarts=0,
        monitor_interval=_MONITOR_S,
        # SIGINT and SIGTERM are ours: the agent would end the ranks on them.
        signals_to_handle="SIGHUP,SIGQUIT",
    )
    arguments = ["-u", "-m", "shoal.train.rank", str(folder.path), str(os.getpid())]
    if job.checkpoint is not None:
        arguments.append(str(job.checkpoint))
    plural = "s" if job.num_ranks != 1 else ""
    print(f"launching {job.num_ranks} rank{plural}; Ctrl-C saves and stops", flush=True)
    with _elastic_logs_in(folder.logs / "launcher.log"), _stop_requests(folder):
        try:
            elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            if was_interrupted(error.failures):
                return EXIT_INTERRUPTED
            raise as_error(error.failures, folder.logs) from None
        except SignalException:
            print(f"stopped at once. {_last_words(folder)}", file=sys.stderr)
            return EXIT_INTERRUPTED
        finally:
            folder.stop_request.unlink(missing_ok=True)
    return 0


@contextmanager
def _stop_requests(folder: RunFolder) -> Iterator[None]:
    """Turn the first signal into a request that the ranks see, a later one into the end."""

    def ask() -> None:
        folder.stop_request.touch()
        print("stopping after this step, then saving; Ctrl-C again quits at once", file=sys.stderr)

    def insist(number: signal.Signals) -> NoReturn:
        # The agent takes this for its own handler's, and passes the signal on: SIGTERM, because
        # SIGINT would only ask the ranks once more.
        raise SignalException(f"got {number.name} again", signal.SIGTERM)

    with stop_signals([signal.SIGINT, signal.SIGTERM], ask=ask, insist=insist):
        yield


@contextmanager
def _elastic_logs_in(path: Path) -> Iterator[None]:
    """Send what torch's launcher logs to a file instead of the terminal."""
    logger = logging.getLogger("torch.distributed")
    handler = logging.FileHandler(path, mode="w")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    # Torch gives this logger a handler of its own, which writes to stderr.
    handlers, propagate = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        handler.close()


def _last_words(folder: RunFolder) -> str:
    if latest(folder.checkpoints) is None:
        return "There is no checkpoint yet."
    return f"Resume from the last checkpoint with: shoal train --resume {folder.path}"
