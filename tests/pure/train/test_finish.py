"""The last words of a run."""

from pathlib import Path

import pytest

from shoal.train import finish
from shoal.train.config import RunConfig, TrainConfig
from shoal.train.folder import RunFolder
from shoal.train.job import Job

JOB = Job(
    config=TrainConfig(run=RunConfig(steps=9)), folder=RunFolder(Path("runs/x")), checkpoint=None
)


@pytest.mark.parametrize("finished", [True, False])
def test_a_person_learns_where_things_are_and_how_to_go_on(capsys, monkeypatch, finished):
    monkeypatch.setattr(finish, "write_report", lambda folder: folder / "report.html")
    finish.conclude(JOB, Path("runs/x/checkpoints/step-9"), step=9, finished=finished)
    out = capsys.readouterr().out
    assert ("finished" in out) is finished
    assert "runs/x/checkpoints/step-9" in out
    assert "runs/x/report.html" in out
    more = " --steps +100" if finished else ""
    assert f"shoal train --resume runs/x{more}\n" in out


def test_a_run_does_not_fail_for_want_of_a_report(capsys, monkeypatch):
    def write_report(folder):
        raise ModuleNotFoundError("No module named 'jinja2'", name="jinja2")

    monkeypatch.setattr(finish, "write_report", write_report)
    finish.conclude(JOB, Path("checkpoint"), step=9, finished=True)
    assert "not written, since jinja2 is not installed" in capsys.readouterr().out
