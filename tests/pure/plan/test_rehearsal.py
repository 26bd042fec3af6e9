"""Rehearsals on this machine's CPU, beside the forecast; and the script that makes many of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from shoal.cli.main import main
from shoal.layout import Flat
from shoal.plan import Setup, forecast_setup
from shoal.plan.plan_file import read_plan_file
from shoal.plan.rehearsal import rehearse

SCRIPTS = Path(__file__).parents[3] / "benchmarks"
TEXT = """
import torch
from shoal.bench.model import BenchTransformer, ModelShape
def model():
    return BenchTransformer(ModelShape(dim=64, num_layers=3, num_heads=2, vocab_size=128))
def inputs(batch=2):
    tokens = torch.zeros(batch, 32, dtype=torch.long)
    return tokens, tokens
def units(model):
    return list(model.blocks)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize(
    "setup",
    [
        Setup(world=8),
        Setup(world=64, replicas=2, layout=Flat(), micro_batches=5, checkpointing=2),
    ],
    ids=str,
)
def test_memory_is_what_was_forecast(file: Path, setup: Setup) -> None:
    workload = read_plan_file(file).workload({})
    found = forecast_setup(workload, setup, device="cpu")
    real = rehearse(workload, setup, device_type="cpu", num_timed=2)
    assert real.allocated_peak_bytes == pytest.approx(found.memory.allocated_peak_bytes, rel=0.01)
    assert len(real.steps_ms) == 2
    assert 0 < real.forward_backward_ms <= real.step_ms
    assert not dist.is_initialized()


def test_both_stand_side_by_side(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", str(file), "--on", "cpu", "--world", "4", "--batch", "1"]) == 0
    said = capsys.readouterr().out
    assert "allocated peak" in said
    assert "rehearsal" in said


def test_json_has_both(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", str(file), "--on", "cpu", "--world", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"forecast", "rehearsal", "compared"} == found.keys()
    assert found["rehearsal"]["allocated_peak_bytes"] > 0


@pytest.mark.soak
@pytest.mark.parametrize(
    "words", [["forecast.py", "--slice", "1/1"], ["budgets.py"]], ids=["forecast", "budgets"]
)
def test_the_scripts_run_on_a_cpu(words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    script, *flags = words
    command = [sys.executable, str(SCRIPTS / script), *flags, "--tiny", "--out", str(out)]
    subprocess.run(command, check=True, timeout=3600)
    assert json.loads(out.read_text())["summary"]["failed"] == []


def test_a_pair_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from forecast import PLANS, measure, scatter, summarise  # pyright: ignore

    one = measure("small", PLANS[4], is_tiny=True)
    assert abs(one["off"]["allocated_peak_bytes"]) < 0.01
    found = [{"model": "small", "plan": str(PLANS[4]), **one}]
    assert summarise(found)["off"]["step_ms"]["num"] == 1
    assert {"x", "y", "model", "plan", "figure"} == scatter(found)[0].keys()
