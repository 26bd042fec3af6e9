"""Lightning's Trainer and Fabric on shoal: the numbers of torch's FSDP2 in the same framework."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from integrations.launching import EXAMPLES, SCRIPTS, needs, python, succeed, torchrun

pytestmark = [needs("lightning"), pytest.mark.timeout(400)]


def run(case: str, folder: Path, ranks: int = 2) -> dict[str, Any]:
    succeed(torchrun(SCRIPTS / "lightning_runs.py", case, folder, ranks=ranks))
    return json.loads((folder / f"{case}.json").read_text())


def test_trainer_and_another_number_of_ranks(tmp_path: Path) -> None:
    found = run("trainer", tmp_path)
    assert found["units"] == 3  # two layers, the module around them
    assert found["shoal"] == found["torch"]
    assert found["same_weights"]
    assert len(found["resumed"]) == 2
    assert found["resumed"] == found["torch resumed"]
    assert found["same_resumed"]
    for ranks in (1, 3):
        other = run("other_ranks", tmp_path, ranks)
        assert other == {"ranks": ranks, "same_weights": True, "steps": 2, "moved": True}


@pytest.mark.soak
def test_layouts_manual_optimisation_and_meta(tmp_path: Path) -> None:
    found = run("variants", tmp_path)
    assert found["is_flat"]
    assert found["flat"] == found["plain"] == found["by_hand"]
    assert len(found["flat_resumed"]) == 2
    assert found["meta_moves"]


@pytest.mark.soak
def test_fabric(tmp_path: Path) -> None:
    found = run("fabric", tmp_path)
    assert found["shoal"] == found["torch"]
    assert found["shoal after"] == found["shoal reloaded"] == found["torch after"]
    assert found["shoal state"] == [3, {"lr": 0.1}, []]


@pytest.mark.soak
def test_mistakes_say_what_to_do(tmp_path: Path) -> None:
    found = run("mistakes", tmp_path)
    assert "units names ['Blok'], of which Model has no module. It has ['Dropout'" in found["units"]
    assert "units is a collection of classes or names" in found["one name"]
    assert "is no checkpoint of shoal. Expected a folder" in found["no checkpoint"]


@pytest.mark.soak
def test_the_example_starts_its_own_ranks(tmp_path: Path) -> None:
    example = EXAMPLES / "lightning_trainer.py"
    printed = succeed(python(example, "--output", tmp_path, "--steps", 4))
    assert "rank 0 ends at step 4" in printed
    again = python(example, "--output", tmp_path, "--resume", tmp_path / "last.ckpt", "--steps", 6)
    assert "rank 0 ends at step 6" in succeed(again)
