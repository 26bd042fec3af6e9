"""The page and the trace of a forecast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.report.plan_page import frontier

TEXT = """
import torch
from torch import nn
class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))
    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return x
def model():
    return Blocks()
def inputs(batch=4):
    return torch.zeros(batch, 256)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "<model>.py"
    path.write_text(TEXT)
    return path


def test_a_forecast_is_drawn(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, trace = tmp_path / "plan.html", tmp_path / "trace.json"
    flags = ["--world", "64", "--html", str(page), "--trace", str(trace), "--json"]
    assert main(["plan", str(file), *flags]) == 0
    json.loads(capsys.readouterr().out)
    html = page.read_text()
    for words in (
        "Memory over the step",
        "optimizer state",
        "The schedule of one step",
        "blocks.2",
    ):
        assert words in html
    assert "http" not in html.replace("http-equiv", "")
    events = json.loads(trace.read_text())["traceEvents"]
    names = {one["args"]["name"] for one in events if one["ph"] == "M"}
    assert {"compute", "link", "engine: gather", "engine: forward"} <= names
    timed = [one for one in events if one["ph"] == "X"]
    assert all(one["dur"] >= 0 and one["ts"] >= 0 for one in timed)
    assert {one["tid"] for one in timed} <= {one["tid"] for one in events if one["ph"] == "M"}
    memory = [one["args"] for one in events if one["ph"] == "C"]
    assert max(sum(one.values()) for one in memory) > 3 * 256 * 256 * 4 / 64 * 3


def test_the_memory_of_the_picture_peaks_at_the_peak() -> None:
    from shoal.plan import Setup, Workload, forecast_setup

    space: dict[str, object] = {}
    exec(TEXT, space)
    work = Workload(model=space["model"], inputs=space["inputs"])  # pyright: ignore
    found = forecast_setup(work, Setup(world=4), draws=True)
    assert found.picture is not None
    tops = [sum(alive.values()) for _, alive in found.picture.memory]
    assert max(tops) == found.memory.allocated_peak_bytes
    times = [at for at, _ in found.picture.memory]
    assert times == sorted(times)
    last = max(one.end_us for one in found.picture.actions)
    assert last == pytest.approx(found.time.step_ms * 1e3, rel=0.01)
    assert "picture" not in found.to_json()


def test_all_plans_of_a_search_are_drawn(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", str(file), "--world", "2", "--fit", "80GB", "--html", str(page)]) == 0
    assert "the chosen one" in capsys.readouterr().out
    html = page.read_text()
    for words in ("Time against memory of all plans", "The chosen plan", "fully_shard(model"):
        assert words in html


def test_a_page_that_cannot_be_written_is_named(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in ("--html", "--trace"):
        assert main(["plan", str(file), flag, str(tmp_path / "no" / "where")]) == 2
        assert f"Name another file with {flag}" in capsys.readouterr().err


def test_the_frontier_has_what_nobody_beats_in_both() -> None:
    points = [(3.0, 1.0), (1.0, 5.0), (2.0, 5.0), (2.0, 3.0), (4.0, 2.0)]
    assert frontier(points) == [(1.0, 5.0), (2.0, 3.0), (3.0, 1.0)]
    assert frontier([]) == []
