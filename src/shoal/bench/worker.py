"""The process of one rank of one run: builds when asked, then steps when asked.

Importing is done before the first request is read, so that the processes of a case can be started
together and be ready when their turn comes. Until then they touch no device.
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass, replace
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from shoal.bench.engines import ENGINES
from shoal.bench.figures import Built, ComputeRound, OptimizerRound
from shoal.bench.group import join
from shoal.bench.pin import stay_on
from shoal.bench.run import Mode, Run
from shoal.bench.workbench import Workbench, build_model


class Verb(StrEnum):
    """What a worker can be asked for."""

    BUILD = "build"
    COMPUTE = "compute"
    OPTIMIZE = "optimize"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One thing to do."""

    verb: Verb
    steps: int
    core: int | None = None
    """Where to do it; None: anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The answer of a worker that could not do it."""

    message: str


Reply = Built | ComputeRound | OptimizerRound | Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where one worker sits: its rank, and the files it shares with the others."""

    rank: int
    store_path: Path
    """The ranks find each other through it."""
    log_path: Path
    """What the process prints goes there."""


def serve(run: Run, seat: Seat, connection: Connection) -> None:
    """Answer requests until there are no more, or one fails."""
    _enter(seat)
    worker = _Worker(run, seat)
    while True:
        try:
            request: Request = connection.recv()
        except EOFError:
            break
        try:
            reply = worker.answer(request)
        except BaseException:
            connection.send(Failure(message=traceback.format_exc()))
            raise
        connection.send(reply)


def _enter(seat: Seat) -> None:
    # A group of its own, so that whatever it starts (Inductor's compilers) can be ended with it.
    os.setsid()
    log = os.open(seat.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


class _Worker:
    def __init__(self, run: Run, seat: Seat) -> None:
        self._run = run
        self._seat = seat
        self._workbench: Workbench | None = None

    def answer(self, request: Request) -> Reply:
        if request.verb is Verb.BUILD:
            return self._build(warmup=request.steps)
        if self._workbench is None:
            raise RuntimeError(f"{request.verb} was asked for before {Verb.BUILD}")
        probe_ms = None
        if self._run.device_type == "cuda":
            # Not before the first round, because Inductor compiles on all cores.
            probe_ms = None if request.core is None else stay_on(request.core)
            self._workbench.warm_up(steps=2)
        if request.verb is Verb.COMPUTE:
            return replace(self._workbench.time_compute(request.steps), probe_ms=probe_ms)
        return self._workbench.time_optimizer(request.steps)

    def _build(self, warmup: int) -> Built:
        run, engine = self._run, ENGINES[self._run.engine]
        if run.device_type == "cpu":
            torch.set_num_threads(1)
        else:
            torch.cuda.set_device(run.device)
        count = join(run, self._seat.rank, self._seat.store_path) if engine.uses_group else None
        model = build_model(run)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        workbench = Workbench(run, engine.wrap(model, run))
        # Recorded graphs call nobody when they are replayed, so that only a first step counts.
        before = 0 if run.mode is Mode.CUDAGRAPHS else warmup
        workbench.warm_up(before)
        collectives = count(lambda: workbench.warm_up(1)) if count else None
        workbench.warm_up(warmup - before)
        self._workbench = workbench
        return Built(num_parameters=num_parameters, collectives=collectives)
