"""The order of a measurement: which job is asked for what, and when.

The engines of a case take turns, round by round, so that whatever else the machine does hits them
alike. Where they do not fit on a GPU together, they are built one after the other, and give up
memory while they wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from enum import StrEnum
from itertools import groupby
from time import monotonic

from shoal.bench.cases import Mode, Pace, Run
from shoal.bench.engines import refusal
from shoal.bench.figures import Built, ComputeRound, OptimizerRound, summarise
from shoal.bench.host import Host, fastest_core
from shoal.bench.job import Job, JobError
from shoal.bench.results import Record, Status

EAGER_TIMEOUT_S = 180.0
COMPILE_TIMEOUT_S = 600.0


class Stage(StrEnum):
    """What a job is doing."""

    BUILD = "building and warming up"
    COMPUTE = "timing forward+backward"
    OPTIMIZE = "timing the optimizer"


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
                yield _without_figures(run, host, Status.UNSUPPORTED, reason)
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
    together = _fit_together(runs, host)
    with ExitStack() as processes:
        in_progress: list[_RunInProgress] = []
        for run in runs:
            job = Job(run, timeout_s or _default_timeout_s(run), rests=not together)
            in_progress.append(_RunInProgress(processes.enter_context(job), host, on_stage))
        build, *timed = _stages(runs[0].case.pace)
        # What is not timed is done by all at once, if it can be: compilers take minutes.
        with ThreadPoolExecutor(len(in_progress) if together else 1) as threads:
            list(threads.map(lambda run: run.enter(build), in_progress))
        for stage in timed:
            core = _core_for(runs[0])
            for one in in_progress:
                one.enter(stage, core)
        for one in in_progress:
            yield one.finish(monotonic() - began_s)


def _fit_together(runs: Sequence[Run], host: Host) -> bool:
    case = runs[0].case
    if runs[0].device_type == "cpu" or case.quick:
        return True
    return host.gpu_memory_gib is not None and host.gpu_memory_gib >= case.gib_each * len(runs)


def _core_for(run: Run) -> int | None:
    """Where processes that wait for a GPU run; ranks on CPUs need the cores that they have."""
    return fastest_core() if run.device_type == "cuda" else None


def _default_timeout_s(run: Run) -> float:
    return EAGER_TIMEOUT_S if run.mode is Mode.EAGER else COMPILE_TIMEOUT_S


def _stages(pace: Pace) -> list[Stage]:
    return [Stage.BUILD, *[Stage.COMPUTE] * pace.rounds, *[Stage.OPTIMIZE] * pace.rounds]


def _device_name(run: Run, host: Host) -> str:
    return host.gpu if run.device_type == "cuda" and host.gpu is not None else host.cpu


def _without_figures(
    run: Run, host: Host, status: Status, reason: str, took_s: float | None = None
) -> Record:
    return Record(
        case=run.case.name,
        engine=run.engine,
        mode=run.mode,
        device=_device_name(run, host),
        status=status,
        reason=reason,
        took_s=took_s,
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
            reason = self._failure or "it was never built"
            return _without_figures(run, self._host, Status.FAILED, reason, took_s)
        return Record(
            case=run.case.name,
            engine=run.engine,
            mode=run.mode,
            device=_device_name(run, self._host),
            status=Status.OK,
            figures=summarise(run.device_type, self._built, self._compute, self._optimizer),
            compute_rounds=tuple(self._compute),
            optimizer_rounds=tuple(self._optimizer),
            took_s=took_s,
        )
