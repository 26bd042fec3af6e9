"""The processes of one run, seen from the command that asks them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic
from typing import Any, cast

import torch

from shoal._torch import dynamo
from shoal.bench.cases import Run
from shoal.bench.engines import ENGINES
from shoal.bench.figures import Built, ComputeRound, Memory, OptimizerRound
from shoal.bench.worker import Failure, Stage, log_path, serve
from shoal.errors import RankError

LAST_LINES = 12
"""How much of a failed process's words are kept."""


class JobError(RankError):
    """A run's process failed, died, or took too long."""


class Job:
    """Starts a run's processes, asks them, and ends them.

    With `with`: whatever happens, no process is left behind. Only the time that the processes spend
    on requests counts against `timeout_s`, not the time in which other jobs have their turn. Jobs
    that cannot be on a device together rest between requests: they keep no memory for steps.
    """

    def __init__(self, run: Run, timeout_s: float, *, rests: bool = False) -> None:
        self.run = run
        self._rests = rests
        self._timeout_s = self._left_s = timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="shoal-bench-"))
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        alone = run.case.network is not None or not ENGINES[run.engine].uses_group
        for rank in range(1 if alone else run.case.world_size):
            self._start(rank)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def build(self) -> Built:
        """Make the model, wrap it, warm it up: what rank 0 says, with the largest rank's memory."""
        answers: list[Built] = self._ask(Stage.BUILD)
        return replace(
            answers[0],
            memory=Memory.largest(answer.memory for answer in answers),
            training_memory=Memory.largest(answer.training_memory for answer in answers),
        )

    def compute(self, core: int | None = None) -> ComputeRound:
        """One round of forward+backward: rank 0's times."""
        return self._ask(Stage.COMPUTE, core)[0]

    def optimize(self, core: int | None = None) -> OptimizerRound:
        """One round of whole training steps: rank 0's times."""
        return self._ask(Stage.OPTIMIZE, core)[0]

    def close(self) -> None:
        """End the processes and remove what they wrote; again, do nothing."""
        # Forgotten at once: the system may give an ended process's number to a stranger.
        processes, self._processes = self._processes, []
        for process in processes:
            # Not asked politely: taking groups and contexts down takes seconds and changes nothing.
            _kill_group(process)
        for process in processes:
            process.join()
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, rank: int) -> None:
        context = _context()
        ours, theirs = context.Pipe()
        args = (self.run, rank, self._folder, self._rests, theirs)
        process = context.Process(target=serve, args=args, daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        self._connections.append(cast(Connection, ours))

    def _ask(self, stage: Stage, core: int | None = None) -> list[Any]:
        """What the worker of each rank answers, in the order of ranks."""
        for rank, connection in enumerate(self._connections):
            try:
                connection.send((stage, core))
            except OSError:
                raise self._death(rank) from None
        answers: dict[int, Any] = {}
        asked_at = monotonic()
        while missing := [rank for rank in range(len(self._connections)) if rank not in answers]:
            left_s = self._left_s - (monotonic() - asked_at)
            ready = wait([self._connections[rank] for rank in missing], timeout=max(left_s, 0.0))
            if not ready:
                name = stage.name.lower()
                raise JobError(f"timed out: {name} was not done within {self._timeout_s:g} s")
            for rank in missing:
                if self._connections[rank] in ready:
                    answers[rank] = self._receive(rank)
        self._left_s -= monotonic() - asked_at
        return [answers[rank] for rank in sorted(answers)]

    def _receive(self, rank: int) -> Any:
        try:
            reply = self._connections[rank].recv()
        except (EOFError, OSError):
            raise self._death(rank) from None
        if isinstance(reply, Failure):
            raise JobError(f"rank {rank}: {_last_lines(reply.message)}")
        return reply

    def _death(self, rank: int) -> JobError:
        process = self._processes[rank]
        process.join(timeout=5)
        log = log_path(self._folder, rank)
        words = log.read_text(errors="replace") if log.exists() else ""
        return JobError(f"rank {rank} died, exit code {process.exitcode}\n{_last_lines(words)}")


def _context() -> SpawnContext | ForkServerContext:
    """Fork what has imported torch once, but where there is CUDA, which does not survive a fork."""
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Of torch only: where shoal is found depends on the caller's path, which the server lacks.
    context.set_forkserver_preload(["torch.distributed.fsdp", dynamo.DYNAMO_MODULE])
    return context


def _last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-LAST_LINES:])


def _kill_group(process: BaseProcess) -> None:
    """End a worker with all it started; it made itself the leader of its own group."""
    if process.pid is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
