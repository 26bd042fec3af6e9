"""What a run writes down while it runs."""

import json
import math
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from shoal.errors import CheckpointError
from shoal.report.metrics import StepRecord, ValidationRecord, read_metrics
from shoal.report.timeline import read_timeline
from shoal.runtime.recorder import RecordedAction
from shoal.step.action import ActionKind
from shoal.train.journal import Journal, MetricsFile, TimelineFile
from shoal.train.observe.loggers import TensorBoard


def write(path, steps, *, start_step=0):
    metrics = MetricsFile(path, start_step=start_step, num_ranks=2)
    for step in steps:
        metrics.on_step(StepRecord(step=step, loss=1 / step, memory_bytes=(1, 2)), ())
    metrics.on_validation(ValidationRecord(step=steps[-1], loss=9.0))
    metrics.close()


def test_what_is_written_is_what_the_report_reads(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    first = json.loads(path.read_text().splitlines()[0])
    assert (first["kind"], first["step"], first["loss"]) == ("step", 1, 1.0)
    metrics = read_metrics(path)
    assert [record.loss for record in metrics.steps] == [1.0, 0.5]
    assert metrics.steps[0].memory_bytes == (1, 2)
    assert metrics.validations == (ValidationRecord(step=2, loss=9.0),)
    assert metrics.problems == ()


def test_what_json_has_no_word_for_is_a_gap(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, start_step=0, num_ranks=2)
    metrics.on_step(StepRecord(step=1, loss=math.nan, grad_norm=math.inf), ())
    metrics.close()
    (line,) = path.read_text().splitlines()
    fields = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert (fields["loss"], fields["grad_norm"]) == (None, None)
    (record,) = read_metrics(path).steps
    assert math.isnan(record.loss)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_with_the_path(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, start_step=0, num_ranks=2)
    os.dup2(os.open("/dev/full", os.O_WRONLY), metrics._file.fileno())
    message = r"cannot write .*metrics.jsonl: No space left on device"
    journal = Journal([metrics])
    with pytest.raises(CheckpointError, match=message), journal:
        journal.step(StepRecord(step=1, loss=1.0), ())


def test_a_resume_drops_what_came_after_its_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3, 4])
    with path.open("a") as file:
        file.write('{"kind": "step", "st')  # cut off by a crash
    write(path, [3], start_step=2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("step", 1),
        ("step", 2),
        ("resume", 2),
        ("step", 3),
        ("validation", 3),
    ]


def test_the_timeline_is_of_the_median_of_the_last_steps(tmp_path):
    path = tmp_path / "timeline.json"
    timeline = TimelineFile(path)
    timeline.close()
    assert not path.exists()
    slow = {1: 900.0, 2: 800.0, 16: 700.0}  # of the last nine steps, 12 to 20, only one
    for step in range(1, 21):
        action = RecordedAction(
            kind=ActionKind.FORWARD, unit=f"unit of {step}", start_us=0, end_us=5
        )
        own_ms = (slow.get(step, 100.0 + step), 50.0)  # all ranks know it, and choose alike
        record = StepRecord(step=step, loss=1.0, step_ms=1.0, own_ms=own_ms)
        timeline.on_step(record, (action,))
    timeline.close()
    found, problems = read_timeline(path)
    assert (found.step, found.rank, problems) == (17, 0, [])
    assert found.actions[0].unit == "unit of 17"


def test_no_timeline_is_written_into_a_folder_that_took_the_name(tmp_path):
    path = tmp_path / "run" / "timeline.json"
    path.parent.mkdir()
    timeline = TimelineFile(path)
    timeline.on_step(StepRecord(step=1, loss=1.0, step_ms=1.0), ())
    path.parent.rename(tmp_path / "aside")
    path.parent.mkdir()
    timeline.close()
    assert not path.exists()


def test_every_number_becomes_a_scalar(tmp_path, monkeypatch):
    scalars: dict[tuple[str, int], float] = {}

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            scalars[name, step] = value

        def close(self) -> None:
            scalars["closed", 0] = 1

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    board = TensorBoard(tmp_path)
    board.on_step(StepRecord(step=3, loss=2.0, lr=0.1, memory_bytes=(5, 6)), ())
    board.on_validation(ValidationRecord(step=3, loss=2.5))
    board.close()
    assert scalars["train/loss", 3] == 2.0
    assert scalars["train/lr", 3] == 0.1
    assert scalars["memory/rank_1", 3] == 6
    assert scalars["validation/loss", 3] == 2.5
    assert scalars["closed", 0] == 1
