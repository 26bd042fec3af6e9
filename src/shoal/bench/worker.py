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
from torch import nn

from shoal.bench.cases import Mode, Run
from shoal.bench.engines import ENGINES
from shoal.bench.figures import Built, Collectives, ComputeRound, Gathers, OptimizerRound
from shoal.bench.group import count, join
from shoal.bench.host import stay_on
from shoal.bench.model import ValuesError
from shoal.bench.workbench import Workbench, build_model
from shoal.comm.modelled import ModelledGroup


class Stage(StrEnum):
    """What a worker can be asked for: the name in errors, the value while it is under way."""

    BUILD = "building and warming up"
    COMPUTE = "timing forward+backward"
    OPTIMIZE = "timing the optimizer"


@dataclass(frozen=True, slots=True)
class Failure:
    """The answer of a worker that could not do it."""

    message: str


def log_path(folder: Path, rank: int) -> Path:
    """The file that takes what the process of a rank prints."""
    return folder / f"rank{rank}.log"


def serve(run: Run, rank: int, folder: Path, rests: bool, connection: Connection) -> None:
    """Answer requests, each a stage and a core to do it on, until there are no more or one fails.

    The ranks of a run share a folder. `rests` gives up memory after each request.
    """
    _enter(log_path(folder, rank))
    worker = Worker(run, rank, folder, rests=rests)
    while True:
        try:
            stage, core = connection.recv()
        except EOFError:
            break
        try:
            reply = worker.answer(stage, core)
        except BaseException:
            connection.send(Failure(traceback.format_exc()))
            raise
        connection.send(reply)


def _enter(log_path: Path) -> None:
    # A group of its own, so that whatever it starts (Inductor's compilers) can be ended with it.
    os.setsid()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


class Worker:
    """One rank of a run: builds first, then times as often as it is asked."""

    def __init__(self, run: Run, rank: int, folder: Path, *, rests: bool = False) -> None:
        self._run = run
        self._rank = rank
        self._folder = folder
        self._rests = rests
        self._group: ModelledGroup | None = None
        self._gathers: Gathers | None = None
        self._workbench: Workbench | None = None

    @property
    def workbench(self) -> Workbench:
        """The model and the stopwatch, once they are built."""
        if self._workbench is None:
            raise RuntimeError("there is no workbench before build")
        return self._workbench

    def answer(
        self, stage: Stage, core: int | None = None
    ) -> Built | ComputeRound | OptimizerRound:
        """Do a stage, on a core."""
        reply = self._build() if stage is Stage.BUILD else self._time(stage, core)
        if self._rests and self._workbench is not None:
            self._workbench.rest()
        return reply

    def _time(self, stage: Stage, core: int | None) -> ComputeRound | OptimizerRound:
        workbench, pace = self.workbench, self._run.case.pace
        probe_ms = None
        if self._run.device_type == "cuda":
            # Not before the first round, because Inductor compiles on all cores.
            probe_ms = None if core is None else stay_on(core)
            if self._group is not None and self._gathers is Gathers.KEPT:
                self._group.keep_gathers()
            workbench.warm_up(steps=3)
        if stage is Stage.COMPUTE:
            reply = replace(workbench.time_compute(pace.steps), probe_ms=probe_ms)
        else:
            reply = workbench.time_optimizer(pace.optimizer_steps)
        workbench.inspect(self._group)
        return reply

    def _build(self) -> Built:
        run, engine, pace = self._run, ENGINES[self._run.engine], self._run.case.pace
        if run.device_type == "cpu":
            torch.set_num_threads(1)
        else:
            torch.cuda.set_device(run.device)
        if engine.uses_group:
            self._group = join(run, self._rank, self._folder / "store")
        model = build_model(run)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        wrapped = engine.wrap(model, run)
        self._workbench = workbench = Workbench(run, wrapped)
        collectives = self._warm_up(workbench, pace.warmup)
        memory = workbench.measure_memory(pace.steps)
        training_memory = workbench.measure_training_memory(pace.optimizer_steps)
        self._gathers = self._settle_gathers(workbench, wrapped)
        return Built(
            num_parameters=num_parameters,
            collectives=collectives,
            gathers=self._gathers,
            memory=memory,
            training_memory=training_memory,
        )

    def _warm_up(self, workbench: Workbench, steps: int) -> Collectives | None:
        """Warm up, and count the collectives of one step."""
        # Recorded graphs call nobody when they are replayed, so that only a first step counts.
        before = 0 if self._run.mode is Mode.CUDAGRAPHS else steps
        workbench.warm_up(before)
        collectives = None
        if ENGINES[self._run.engine].uses_group:
            collectives = count(self._group, lambda: workbench.warm_up(1))
        workbench.warm_up(steps - before)
        return collectives

    def _settle_gathers(self, workbench: Workbench, model: nn.Module) -> Gathers | None:
        """Let timed steps keep what gathers delivered, if their values then stay right."""
        workbench.inspect(self._group)
        run, group = self._run, self._group
        if group is None:
            return None
        # A recorded graph replays the kernels that write its gathers.
        if run.device_type == "cpu" or run.case.fill or run.mode is Mode.CUDAGRAPHS:
            return Gathers.WRITTEN
        group.keep_gathers()
        ENGINES[run.engine].gather_apart(model)
        try:
            workbench.warm_up(4)
            workbench.inspect(group)
        except ValuesError as error:
            # To the log of this process, which is shown if the run fails.
            print(f"memory of gathers was written to: {error}")
            group.write_gathers()
            workbench.warm_up(2)
            workbench.inspect(group)
            return Gathers.WRITTEN
        return Gathers.KEPT if group.keeps_all_gathers else Gathers.WRITTEN
