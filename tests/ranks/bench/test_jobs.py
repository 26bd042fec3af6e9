import os
import signal
from dataclasses import replace

import pytest

from shoal.bench.cases import CASES, Case, Mode, Run
from shoal.bench.host import describe_host
from shoal.bench.job import LAST_LINES, Job, JobError
from shoal.bench.measure import measure
from shoal.bench.results import Record, Status

BY_NAME = {case.name: case.quickly() for case in CASES}
TOO_LARGE = replace(BY_NAME["B4"], batch_size=10**12)


def make_run(case: Case, engine: str) -> Run:
    return Run(case=case, engine=engine, mode=Mode.EAGER, device_type="cpu")


def measured(*runs: Run) -> list[Record]:
    return list(measure(runs, describe_host(), timeout_s=60, on_stage=lambda run, stage: None))


def alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        found.append(pid)
    return found


def pids_of(job: Job) -> list[int]:
    return [process.pid for process in job._processes if process.pid is not None]


def test_a_rank_that_raises_is_reported_and_the_others_go_on() -> None:
    failed, succeeded = measured(make_run(TOO_LARGE, "plain"), make_run(BY_NAME["B4"], "plain"))
    assert succeeded.status is Status.OK
    assert failed.status is Status.FAILED
    reason = failed.reason or ""
    assert reason.startswith("rank 0: ")
    assert "RuntimeError" in reason.splitlines()[-1]
    assert len(reason.splitlines()) <= LAST_LINES


def test_a_dead_rank_is_reported_and_none_is_left() -> None:
    with Job(make_run(BY_NAME["B6a"], "fsdp2"), timeout_s=60) as job:
        job.build()
        pids = pids_of(job)
        assert len(pids) == 2
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(JobError, match="rank"):
            job.compute()
    assert alive(pids) == []


def test_a_run_that_takes_too_long_is_ended() -> None:
    with Job(make_run(BY_NAME["B4"], "fsdp2"), timeout_s=0.01) as job:
        pids = pids_of(job)
        with pytest.raises(JobError, match=r"timed out: build was not done within 0\.01 s"):
            job.build()
        job.close()
        assert alive(pids) == []


def test_modelled_and_real_ranks_communicate_alike() -> None:
    """The modelled group's counters agree with what is seen on the way to gloo."""
    real = BY_NAME["B6a"]
    modelled = replace(real, name="B4", family="B4", network=BY_NAME["B4"].network)
    for engine in ("ddp", "fsdp2"):
        counts = []
        for case in (real, modelled):
            with Job(make_run(case, engine), timeout_s=60) as job:
                counts.append(job.build().collectives)
        assert counts[0] is not None
        assert counts[0].num_calls > 0
        assert counts[0] == counts[1]
