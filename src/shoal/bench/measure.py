"""The order of a measurement: which job is asked for what, and when.

The engines of a case take turns, round by round, so that whatever else the machine does hits them
alike. Where they do not fit on a GPU together, they are built one after the other, and give up
memory while they wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import groupby
from time import monotonic
from typing import Any

from shoal.bench.cases import Mode, Run
from shoal.bench.engines import refusal
from shoal.bench.figures import Built, ComputeRound, OptimizerRound, summarise
from shoal.bench.host import Host, fastest_core
from shoal.bench.job import Job, JobError
from shoal.bench.results import Record, Status
from shoal.bench.worker import Stage

EAGER_TIMEOUT_S = 180.0
COMPILE_TIMEOUT_S = 600.0


def measure(
    runs: Sequence[Run],
    host: Host,
    *,
    timeout_s: float | None,
    on_stage: Callable[[Run, Stage], None],
) -> Iterator[Record]:
    """Make the runs and yield each one's record as soon as it is known.

    Runs of one case and mode that stand together share their processes' start. `timeout_s` is per
    run; by default it depends on whether there is something to compile.
    """
    for _, group in groupby(runs, key=lambda run: (run.case, run.mode)):
        possible: list[Run] = []
        for run in group:
            reason = refusal(run)
            if reason is None:
                possible.append(run)
            else:
                yield _record(run, host, Status.UNSUPPORTED, reason=reason)
        yield from _measure_together(possible, host, timeout_s, on_stage)


def _measure_together(
    runs: Sequence[Run],
    host: Host,
    timeout_s: float | None,
    on_stage: Callable[[Run, Stage], None],
) -> Iterator[Record]:
    if not runs:
        return
    began_s = monotonic()
    together, rounds = _fit_together(runs, host), runs[0].case.pace.rounds
    default_s = EAGER_TIMEOUT_S if runs[0].mode is Mode.EAGER else COMPILE_TIMEOUT_S
    with ExitStack() as processes:
        in_progress: list[_RunInProgress] = []
        for run in runs:
            job = Job(run, timeout_s or default_s, rests=not together)
            in_progress.append(_RunInProgress(processes.enter_context(job), host, on_stage))
        # All build at once where they fit: it is not timed, and compilers take minutes.
        with ThreadPoolExecutor(len(in_progress) if together else 1) as threads:
            list(threads.map(lambda one: one.enter(Stage.BUILD), in_progress))
        for stage in [Stage.COMPUTE] * rounds + [Stage.OPTIMIZE] * rounds:
            # Of processes that wait for a GPU; ranks on CPUs need the cores that they have.
            core = fastest_core() if runs[0].device_type == "cuda" else None
            for one in in_progress:
                one.enter(stage, core)
        for one in in_progress:
            yield one.finish(monotonic() - began_s)


def _fit_together(runs: Sequence[Run], host: Host) -> bool:
    case = runs[0].case
    if runs[0].device_type == "cpu" or case.quick:
        return True
    return host.gpu_memory_gib is not None and host.gpu_memory_gib >= case.gib_each * len(runs)


def _record(run: Run, host: Host, status: Status, **outcome: Any) -> Record:
    return Record(
        case=run.case.name,
        engine=run.engine,
        mode=run.mode,
        device=host.gpu if run.device_type == "cuda" and host.gpu is not None else host.cpu,
        status=status,
        **outcome,
    )


class _RunInProgress:
    """One job on its way through the stages."""

    def __init__(self, job: Job, host: Host, on_stage: Callable[[Run, Stage], None]) -> None:
        self._job = job
        self._host = host
        self._on_stage = on_stage
        self._built: Built | None = None
        self._compute: list[ComputeRound] = []
        self._optimizer: list[OptimizerRound] = []
        self._failure: str | None = None

    def enter(self, stage: Stage, core: int | None = None) -> None:
        """Do one stage, on a core; after a failure, nothing."""
        if self._failure is not None:
            return
        self._on_stage(self._job.run, stage)
        try:
            if stage is Stage.BUILD:
                self._built = self._job.build()
            elif stage is Stage.COMPUTE:
                self._compute.append(self._job.compute(core))
            else:
                self._optimizer.append(self._job.optimize(core))
        except JobError as error:
            self._failure = str(error)
            self._job.close()

    def finish(self, took_s: float) -> Record:
        """End the job and say what came out, of a case that took so long."""
        self._job.close()
        run = self._job.run
        if self._failure is not None or self._built is None:
            return _record(run, self._host, Status.FAILED, reason=self._failure, took_s=took_s)
        return _record(
            run,
            self._host,
            Status.OK,
            figures=summarise(run.device_type, self._built, self._compute, self._optimizer),
            compute_rounds=tuple(self._compute),
            optimizer_rounds=tuple(self._optimizer),
            took_s=took_s,
        )
