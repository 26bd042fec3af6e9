"""A profile of this machine's CPU: measured once, kept, and reused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shoal.cli.main import main
from shoal.errors import UsageError
from shoal.plan import Profile
from shoal.plan.profile import profile_for

TEXT = """
import torch
from torch import nn
def model():
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)])
def inputs(batch=64):
    return torch.zeros(batch, 256)
"""
aten = torch.ops.aten
CPU = torch.device("cpu")


def test_a_larger_product_takes_longer() -> None:
    profile = Profile(CPU)
    small, large = (torch.empty(n, n, device="meta") for n in (16, 512))
    times = [profile.time_us(aten.mm.default, (one, one)) for one in (small, large, small)]
    assert times[0] is not None
    assert times[1] is not None
    assert 0 < times[0] * 3 < times[1]
    assert times[2] == times[0]
    assert profile.num_measured == 2
    assert not profile.unmeasured


def test_operators_that_cannot_be_run_by_themselves_are_named() -> None:
    profile = Profile(CPU)
    row, column = torch.empty(1, 3, device="meta"), torch.empty(4, 1, device="meta")
    assert profile.time_us(aten.mm.default, (row, column)) is None
    assert profile.unmeasured == {"aten.mm"}


def test_what_was_measured_is_kept_and_reused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, kept = tmp_path / "model.py", tmp_path / "folder" / "profile.json"
    model.write_text(TEXT)
    words = ["plan", str(model), "--device", "cpu", "--measure", "--profile", str(kept), "--json"]
    assert main(words) == 0
    first = json.loads(capsys.readouterr().out)
    assert any("operators take what they took" in one for one in first["assumptions"])
    written = kept.read_text()
    assert "aten.addmm" in written
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["time"] == first["time"]
    assert kept.read_text() == written


def test_profiles_of_other_devices_are_not_used(tmp_path: Path) -> None:
    kept = tmp_path / "profile.json"
    kept.write_text(json.dumps({"device": "another", "took_us": {"x": 1.0}}))
    assert Profile(CPU, kept)._took_us == {}
    kept.write_text("half of a")
    with pytest.raises(UsageError, match="cannot read the profile"):
        Profile(CPU, kept)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_here_is_named() -> None:
    with pytest.raises(UsageError, match="there is no CUDA device here"):
        profile_for("h200")
