"""A run's forecast beside what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pure.report.runs import CONFIG, make_run
from shoal.report import write_report

FORECAST: dict[str, Any] = {
    "device": "h200",
    "memory": {
        "allocated_peak_bytes": 300 * 2**20,
        "by_category": {"activations": 200 * 2**20, "<b>": 100 * 2**20},
    },
    "time": {"step_ms": 201.0, "forward_backward_ms": 181.0, "exposed_ms": 60.0},
}


def page_with(folder: Path, forecast: object) -> str:
    run = make_run(folder / "run", config=CONFIG)
    (run / "forecast.json").write_text(json.dumps(forecast))
    return write_report(run).read_text()


def test_both_stand_side_by_side(tmp_path: Path) -> None:
    html = page_with(tmp_path, FORECAST)
    assert "Forecast and measured" in html
    assert "activations 200 MiB, &lt;b&gt; 100 MiB" in html
    assert "<td>201 ms</td><td>200 ms</td><td>+0.5%</td>" in html


def test_what_is_far_off_is_said(tmp_path: Path) -> None:
    html = page_with(tmp_path, FORECAST)
    assert "The forecast of exposed communication was off by +100%: 60.0 ms, 30.0 ms." in html
    assert "The forecast of compute was off by -19%" in html
    assert "The forecast of step was" not in html
    assert "The forecast of allocated peak" not in html  # 3 %


def test_memory_of_processes_is_not_judged(tmp_path: Path) -> None:
    forecast = {**FORECAST, "device": "cpu", "memory": {"allocated_peak_bytes": 2**20}}
    html = page_with(tmp_path, forecast)
    assert "Ranks on CPUs report the memory of the whole process." in html
    assert "The forecast of allocated peak" not in html


def test_why_there_is_none(tmp_path: Path) -> None:
    html = page_with(tmp_path, {"why_not": "--compile graph is not modelled"})
    assert "There is no forecast: --compile graph is not modelled" in html


def test_files_of_others_do_no_harm(tmp_path: Path) -> None:
    for number, content in enumerate(
        ([], {}, {"memory": 3, "time": []}, {"time": {"step_ms": "x", "exposed_ms": 1e300}})
    ):
        assert "<html" in page_with(tmp_path / str(number), content)


def test_runs_without_one_say_nothing(tmp_path: Path) -> None:
    html = write_report(make_run(tmp_path / "run")).read_text()
    assert "Forecast and measured" not in html
