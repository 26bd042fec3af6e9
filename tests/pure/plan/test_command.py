"""`shoal plan` on files, good ones and bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli.main import main

EXAMPLE = Path(__file__).parents[3] / "examples" / "plan_file.py"
GOOD = """
import torch
def model():
    return torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
def inputs(batch=4):
    return torch.zeros(batch, 64)
def units(model):
    return list(model)
precision = {"param_dtype": torch.bfloat16}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "good.py"
    path.write_text(GOOD)
    return path


def test_json_has_what_scripts_read(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(file), "--world", "8", "--device", "h200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"allocated_peak_bytes", "reserved_peak_bytes", "by_category"} <= set(found["memory"])
    assert {"step_ms", "forward_backward_ms", "exposed_ms"} <= set(found["time"])
    assert found["fits"] is True
    assert found["assumptions"]
    assert 0 < found["memory"]["allocated_peak_bytes"] <= found["memory"]["reserved_peak_bytes"]


def test_people_see_categories_and_a_verdict(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(file), "--batch", "16", "--network", "ib", "--world", "64"]) == 0
    said = capsys.readouterr().out
    assert "optimizer state" in said
    assert "fits into" in said
    assert "exposed" in said


def test_the_example_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(EXAMPLE), "--checkpointing", "--sequence", "512"]) == 0
    assert "0.93 B parameters" in capsys.readouterr().out


@pytest.mark.parametrize("reference", ["recipes/tiny.py", "recipes/tiny.py:recipe"])
def test_recipes_are_planned(reference: str, capsys: pytest.CaptureFixture[str]) -> None:
    where = str(EXAMPLE.parents[1] / reference)
    assert main(["plan", where, "--world", "4", "--sequence", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_parameters"] > 100_000
    assert main(["plan", where, "--replicas", "2"]) == 2
    assert "the recipe" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "rehearse"])
def test_recipes_that_are_not_modelled_are_named(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.py"
    path.write_text(
        "from shoal.train.config import ParallelConfig, TrainConfig\n"
        "def recipe(): return TrainConfig(parallel=ParallelConfig(compile='graph'))\n"
    )
    assert main([command, str(path), "--world", "2"]) == 2
    assert "--compile graph is not modelled" in capsys.readouterr().err


def test_recipes_cannot_be_searched(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(EXAMPLE.parents[1] / "recipes/tiny.py"), "--fit", "80GB"]) == 2
    assert "cannot be searched" in capsys.readouterr().err


def test_flags_choose_the_setup(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--replicas", "2", "--layout", "flat", "--reshard", "no", "--prefetch", "0"]
    flags += [
        "--micro-batches",
        "3",
        "--reduce-each",
        "--checkpointing",
        "2",
        "--gradients",
        "fp32",
    ]
    assert main(["plan", str(file), *flags]) == 0
    said = capsys.readouterr().out
    assert "2 replicas of 4 shards, Flat, reshard no, prefetch 0" in said
    assert "checkpointing of every 2. unit, 3 micro-batches, each reduced" in said
    assert "gradients in float32" in said


def test_hugging_face_configs_need_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3}
    config |= {"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"vocab_size": 256, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", "--model", f"hf:{tmp_path}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_parameters"] > 100_000
    assert main(["plan", "--model", f"hf:{tmp_path}", "--sequence", "65"]) == 2
    assert "64 positions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "gpt"], "expected hf:PATH"),
        ([], "what is to be planned?"),
        (["file.py", "--model", "hf:x"], "not both"),
    ],
)
def test_what_is_planned_is_named_once(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_plan_is_chosen(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(file), "--world", "2", "--fit", "80GB"]
    assert main([*words, "--global-batch", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "fully_shard(model" in found["code"]
    assert {"plan", "needed_bytes", "why_not"} <= set(found["plans"][0])
    assert main([*words, "--batch", "4"]) == 0
    assert "plans may fit" in capsys.readouterr().out
    assert main(["plan", str(file), "--world", "2", "--fit", "0.5"]) == 2
    assert "The least is" in capsys.readouterr().err


def test_a_budget_decides_the_exit_code(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(file), "--budget", "80GB"]) == 0
    assert main(["plan", str(file), "--budget", "0.1GB"]) == 1
    capsys.readouterr()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def inputs(): pass", "defines no function model()"),
        ("model = 3\ndef inputs(): pass", "defines no function model()"),
        ("1 / 0", "raised ZeroDivisionError"),
        (GOOD + "units = 3", "units is a int, not a function"),
        (GOOD + "precision = {'dtype': torch.bfloat16}", "expected precision to be a dict"),
        (GOOD + "precision = {'param_dtype': 16}", "expected a torch.dtype"),
        (GOOD + "def model(): return 3", "expected model() to return an nn.Module"),
    ],
)
def test_bad_files_are_named(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text)
    assert main(["plan", str(path)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--sequence", "8"], "--sequence needs inputs(sequence=...)"),
        (["--world", "0"], "expected a number of 1 or more"),
        (["--device", "abacus"], "unknown device 'abacus'"),
        (["--budget", "lots"], "expected a size"),
        (["--budget", "nan"], "expected a size"),
        (["--replicas", "3"], "that the replicas divide"),
        (["--reshard", "3"], "divides the 8 ranks that shard"),
        (["--torch", "two"], "expected a release of torch"),
        (["--network", "nvlnk"], "did you mean nvlink?"),
        (["--find", "cheapest"], "say what it is to --fit into"),
        (["--fit", "1GB", "--budget", "1GB"], "--budget goes with a single forecast"),
        (["--fit", "1GB", "--find", "largest-batch", "--batch", "4"], "leave that out"),
        (["--fit", "1MB"], "most of it CUDA's context"),
        (["--fit", "1GB", "--find", "longest-sequence"], "--sequence needs"),
        (["--reshard", "maybe"], "expected a number of 1 or more"),
        (["--wrld", "8"], "Did you mean --world?"),
    ],
)
def test_bad_flags_are_named(
    flags: list[str], words: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(file), *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path / "nothing.py")]) == 2
    assert "there is no file" in capsys.readouterr().err
