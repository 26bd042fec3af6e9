from __future__ import annotations

from dataclasses import replace

import pytest

from pure.bench.samples import HOST, make_built
from shoal.bench.cases import CASES, DeviceType, Mode, Run
from shoal.bench.figures import Built, ComputeRound, OptimizerRound
from shoal.bench.job import JobError
from shoal.bench.measure import measure
from shoal.bench.results import Record, Status

CASE = CASES[0].quickly()  # 2 rounds


class FakeJob:
    """Notes what it is asked for; the engine in `fails` fails in its first round."""

    log: list[str]
    cores: list[int | None]
    fails = ""

    def __init__(self, run: Run, timeout_s: float, *, rests: bool) -> None:
        self.run = run
        self.log.append(f"start {run.engine} {timeout_s:g}{' resting' * rests}")

    def __enter__(self) -> FakeJob:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.log.append(f"left {self.run.engine}")

    def build(self) -> Built:
        self.log.append(f"build {self.run.engine}")
        return make_built()

    def compute(self, core: int | None) -> ComputeRound:
        self.log.append(f"compute {self.run.engine}")
        self.cores.append(core)
        if self.run.engine == self.fails:
            raise JobError("out of memory")
        return ComputeRound(forward_backward_ms=(1.0,), wall_ms=(1.0,), host_ms=(1.0,))

    def optimize(self, core: int | None) -> OptimizerRound:
        self.log.append(f"optimize {self.run.engine}")
        return OptimizerRound(optimizer_ms=(1.0,))

    def close(self) -> None:
        self.log.append(f"close {self.run.engine}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked: list[str] = []
    cores = iter(range(100))
    monkeypatch.setattr(FakeJob, "log", asked, raising=False)
    monkeypatch.setattr(FakeJob, "cores", [], raising=False)
    monkeypatch.setattr("shoal.bench.measure.fastest_core", lambda: next(cores))
    monkeypatch.setattr("shoal.bench.measure.Job", FakeJob)
    return asked


def measured(
    device_type: DeviceType, mode: Mode = Mode.EAGER, gib_each: float = 30
) -> list[Record]:
    case = replace(CASE, quick=False, gib_each=gib_each, network=None)
    runs = [
        Run(case=case, engine=engine, mode=mode, device_type=device_type)
        for engine in ("plain", "shoal")
    ]
    return list(measure(runs, HOST, timeout_s=None, on_stage=lambda run, stage: None))


@pytest.mark.parametrize(("device_type", "gib_each"), [("cpu", 30), ("cuda", 25)])
def test_engines_take_turns_where_they_fit(
    log: list[str], device_type: DeviceType, gib_each: float
) -> None:
    records = measured(device_type, gib_each=gib_each)
    assert set(log[2:4]) == {"build plain", "build shoal"}
    assert log[4:8] == ["compute plain", "compute shoal"] * 2
    assert FakeJob.cores == {"cpu": [None] * 4, "cuda": [0, 0, 1, 1]}[device_type]
    assert [len(record.compute_rounds) for record in records] == [2, 2]
    assert {record.device for record in records} == {{"cpu": "a CPU", "cuda": "a GPU"}[device_type]}


def test_engines_that_do_not_fit_take_turns_and_rest(log: list[str]) -> None:
    records = measured("cuda")
    assert log[:2] == ["start plain 180 resting", "start shoal 180 resting"]
    assert log[2:4] == ["build plain", "build shoal"]
    assert log[4:8] == ["compute plain", "compute shoal"] * 2
    assert {record.device for record in records} == {"a GPU"}


def test_compiling_may_take_longer(log: list[str]) -> None:
    measured("cuda", Mode.COMPILED)
    assert log[:2] == ["start plain 600 resting", "start shoal 600 resting"]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_one_failure_stops_one_engine(
    log: list[str], monkeypatch: pytest.MonkeyPatch, device_type: DeviceType
) -> None:
    monkeypatch.setattr(FakeJob, "fails", "plain")
    plain, shoal = measured(device_type)
    assert (plain.status, plain.reason) == (Status.FAILED, "out of memory")
    assert shoal.status is Status.OK
    assert log.count("compute plain") == 1
    assert "close plain" in log
    assert "optimize plain" not in log
    assert log[-2:] == ["left shoal", "left plain"]


def test_refused_runs_start_nothing(log: list[str]) -> None:
    records = measured("cpu", Mode.CUDAGRAPHS)
    assert log == []
    assert {record.status for record in records} == {Status.UNSUPPORTED}
