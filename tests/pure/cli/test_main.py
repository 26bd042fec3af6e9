"""The command line as a whole: messages and exit codes, in one process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal.cli.main import main
from shoal.version import __version__

TINY = ["--dim", "8", "--layers", "1", "--heads", "2", "--context", "16", "--device", "cpu"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SHOAL_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)


def refused(capsys, *argv: str) -> str:
    """Run a command line that shall be refused; return its one message."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    # `shoal train` says what it does before it imports torch.
    assert re.fullmatch(r"(looking at .*…\n)?", captured.out)
    message = captured.err
    assert message.startswith("shoal: error: ")
    assert message.count("\n") == 1
    assert "Traceback" not in message
    return message


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"shoal {__version__}\n"
    for argv in ([], ["--help"], ["-h"]):
        assert main(argv) == 0
        text = capsys.readouterr().out
        assert all(command in text for command in ("train", "bench", "report", "--traceback"))


def test_python_m_shoal_is_the_same_command():
    source = Path(__file__).parents[3] / "src"
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "trian"],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "shoal: error: unknown command trian. Did you mean train? "
        "The commands are train, plan, rehearse, bench, report, checkpoint, explain, completion.\n"
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--vers"], "unknown flag --vers. Did you mean --version?"),
        (["train", "--stpes", "3"], "unknown flag --stpes. Did you mean --steps?"),
        (["train", "--dim", "-4"], "--dim: expected at least 2, got -4"),
        (["train", "--steps", "+5"], "--steps +5 needs --resume RUN"),
        (["train", "--data", "missing"], "--data: there is no folder missing"),
        (["train", "--data", "empty"], "--data: no files in empty"),
        (["train", "--batch-size", "3", *TINY], "Try --batch-size 4"),
        (["train", "--recipe", "raises.py"], "raises.py, line 2: ZeroDivisionError"),
        (["train", "--recipe", "raises.py", "--resume", "x"], "--recipe does not go with --resume"),
        (["train", "--lr", "inf"], "--lr: expected a finite number, got inf"),
        (["train", "--lr", "1e300"], "--lr: expected at most 1000, got 1e+300"),
        (["train", "--seed", str(2**64)], "--seed: expected at most"),
        (["train", "--threads", "1000000"], "--threads: expected at most 1024"),
        (["train", "--dim", "131072", "--layers", "10000", "--dry-run"], "this machine has"),
        (["train", "--zzz"], "unknown flag --zzz. `shoal"),
        (["train", "--resume", "nowhere"], "--resume: there is no run folder nowhere"),
        (["train", "--out", "file/runs", "--name", "x", *TINY], "cannot write into file/runs/x"),
    ],
)
def test_bad_input_gets_one_message_and_status_2(tmp_path, capsys, argv, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "raises.py").write_text("def recipe():\n    return 1 / 0\n")
    assert message in refused(capsys, *argv)


def test_a_dry_run_prints_the_config_and_writes_nothing(tmp_path, capsys):
    (tmp_path / "my.py").write_text(
        "from shoal.train.config import *\n"
        "def recipe():\n    return TrainConfig(optim=OptimConfig(lr=0.5, warmup=7))\n"
    )
    assert main(["train", "--dry-run", "--recipe", "my.py", "--lr", "0.25", *TINY]) == 0
    config = json.loads(capsys.readouterr().out)
    assert config["optim"]["lr"] == 0.25, "flags win over the recipe"
    assert config["optim"]["warmup"] == 7, "the recipe wins over the defaults"
    assert config["parallel"] == {
        "nproc": 2,
        "device": "cpu",
        "precision": "fp32",
        "replicas": 1,
        "threads": None,
        "engine": "fully_shard",
        "activation_checkpointing": False,
        "compile": "off",
    }
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_a_traceback_can_be_had(monkeypatch, how):
    argv = ["train", "--dim", "-4"]
    if how == "flag":
        argv.append("--traceback")
    else:
        monkeypatch.setenv("SHOAL_TRACEBACK", "1")
    with pytest.raises(ValueError, match="--dim"):
        main(argv)


def test_under_torchrun_one_rank_of_a_machine_speaks(capsys, monkeypatch):
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(2 + rank))
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert main(["train", "--dim", "-4"]) == 2
        assert bool(capsys.readouterr().err) is (rank == 0)


def test_an_interrupt_before_anything_runs_is_no_traceback(capsys, monkeypatch):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.cli.train.main", interrupted)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "shoal: interrupted\n"


def test_a_model_is_looked_at_before_anything_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text('{"model_type": "lama"}')
    for flags, message in (
        (["--model", "gpt2"], "--model: expected hf:PATH"),
        (["--model", "hf:"], "--model: expected hf:PATH"),
        (["--model", "hf:gpt2"], "there is no file or folder gpt2"),
        (["--model", "hf:config.json", "--dim", "64"], "--dim does not go with --model"),
        (["--model", "hf:config.json", "--engine", "fsdp1-style"], "--model needs --engine"),
    ):
        assert main(["train", *flags]) == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["train", "--print-config"]])
def test_what_is_only_shown_does_not_wait_for_torch(words):
    script = f"""
import sys
import shoal
from shoal.cli.main import main
try:
    main({words!r})
finally:
    sys.stderr.write(str(sorted({{"torch", "numpy"}} & set(sys.modules))))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(Path(shoal.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == "[]", done.stderr
