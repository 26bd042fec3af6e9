"""torchtitan's trainer on shoal: the numbers of torch's FSDP2 in the same trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from integrations.launching import EXAMPLES, SCRIPTS, needs, succeed, torchrun

pytestmark = [needs("torchtitan", "triton"), pytest.mark.timeout(400)]


def run(case: str, folder: Path) -> dict[str, Any]:
    succeed(torchrun(SCRIPTS / "titan_runs.py", case, folder))
    return json.loads((folder / f"{case}.json").read_text())


@pytest.mark.parametrize(
    "case",
    [
        "plain",
        *(pytest.param(one, marks=pytest.mark.soak) for one in ("bf16", "chunked", "accumulated")),
    ],
)
def test_trainer(case: str, tmp_path: Path) -> None:
    found = run(case, tmp_path)
    assert found["torch classes"] == ["torch"]
    assert found["shoal classes"] == ["shoal"]
    assert found["units"][0] == found["units"][1] > 6
    assert found["sharded"]
    losses = [loss for _, loss, _ in found["shoal"]]
    assert losses[-1] < losses[0] - 1, "a run that learns nothing proves nothing"
    assert found["shoal"] == found["torch"]
    assert found["same_weights"]
    assert found["resumed"] == found["shoal"][2:]
    assert found["same_resumed"]


@pytest.mark.soak
def test_the_example(tmp_path: Path) -> None:
    done = torchrun(EXAMPLES / "titan.py", tmp_path)
    succeed(done)
    assert "Training completed" in done.stdout + done.stderr
    assert (tmp_path / "checkpoint" / "step-4").is_dir()
