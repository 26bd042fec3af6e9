"""Commands whose files are pipes, devices or folders: refused at once, by name."""

import json
import os
import shutil
import socket
from pathlib import Path

import pytest
import torch

from shoal.checkpoint import save_training, step_folder
from shoal.cli.main import main

TINY = ["--dim", "8", "--layers", "1", "--heads", "2", "--context", "8", "--device", "cpu"]
KINDS = {
    "pipe": os.mkfifo,
    "socket": lambda path: bind(path),
    "folder": os.mkdir,
    "device": lambda path: os.mknod(path, 0o600 | 0o020000, os.makedev(5, 0)),  # /dev/tty
}
PROGRESS = {"step": 7, "samples": 28, "tokens": 700, "data_digest": "x", "scale": {}}

pytestmark = pytest.mark.timeout(60)


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))


def make(kind: str, path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    try:
        KINDS[kind](path)
    except PermissionError:
        pytest.skip(f"may not make a {kind}")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("some text " * 50)
    return tmp_path


@pytest.fixture
def run(here: Path, capsys) -> Path:
    """A run folder with a checkpoint at step 7 of 10."""
    flags = ["--data", "data", "--steps", "10", *TINY]
    assert main(["train", "--dry-run", *flags]) == 0
    folder = here / "runs" / "x"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(capsys.readouterr().out)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    save_training(step_folder(folder / "checkpoints", 7), model, optimizer, PROGRESS)
    assert main(["train", "--dry-run", "--resume", "runs/x"]) == 0
    return folder


def refusal(capsys, *argv: str) -> str:
    assert main(list(argv)) in (1, 2)
    err = capsys.readouterr().err
    assert err.startswith("shoal: error: ")
    return err


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_that_is_no_file_is_refused(run, capsys, kind):
    make(kind, run / "config.json")
    err = refusal(capsys, "train", "--dry-run", "--resume", "runs/x")
    assert f"cannot read config.json: it is a {kind}, not a regular file" in err


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "folder"])
def test_a_lock_that_is_no_file_is_refused(run, capsys, kind):
    make(kind, run / ".lock")
    err = refusal(capsys, "train", "--dry-run", "--resume", "runs/x")
    assert f"it is a {kind}, not a regular file" in err


@pytest.mark.parametrize("kind", KINDS)
def test_a_recipe_that_is_no_file_is_refused(here, capsys, kind):
    make(kind, here / "recipe.py")
    err = refusal(capsys, "train", "--dry-run", "--recipe", "recipe.py")
    assert f"cannot read recipe.py: it is a {kind}, not a regular file" in err


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "folder"])
def test_data_that_is_no_folder_is_refused(here, capsys, kind):
    make(kind, here / "odd")
    err = refusal(capsys, "train", "--dry-run", "--data", "odd", *TINY)
    assert f"expected a folder of text files, but odd is a {kind}" in err


@pytest.mark.parametrize("kind", KINDS)
def test_odd_files_among_the_data_are_left_out(here, capsys, kind):
    make(kind, here / "data" / "b.txt")
    (here / "data" / "c.txt").symlink_to("b.txt")
    assert main(["train", "--dry-run", "--data", "data", *TINY]) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "timeline.json", "sample.txt"])
def test_a_report_names_files_that_it_cannot_read(run, capsys, kind, name):
    step = {"kind": "step", "step": 1, "loss": 2.0}
    (run / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    make(kind, run / name)
    assert main(["report", "runs/x"]) == 0
    page = (run / "report.html").read_text()
    assert f"{name} cannot be read: it is a {kind}, not a regular file" in page
