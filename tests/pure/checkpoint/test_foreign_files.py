"""A checkpoint from somebody else: its names stay inside its folder, its files are regular ones."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from shoal.checkpoint import (
    DcpReader,
    export_weights,
    load,
    load_model,
    read_manifest,
    reshard,
    save,
    verify,
)
from shoal.checkpoint.manifest import NAME, sealed
from shoal.cli.main import main
from shoal.errors import CheckpointError

FILE = "rank-00000.safetensors"

READERS: dict[str, Callable[[Path], object]] = {
    "verify": verify,
    "read_manifest": read_manifest,
    "load": lambda folder: load(folder, {"model/w": torch.zeros(3, 2)}),
    "load_model": lambda folder: load_model(folder, Holder()),
    "reshard": lambda folder: reshard(folder, folder.parent / "out", 2),
    "export_weights": lambda folder: export_weights(folder, folder.parent / "out"),
    "DcpReader": lambda folder: dcp.load(
        {"model/w": torch.zeros(3, 2)}, storage_reader=DcpReader(folder), no_dist=True
    ),
}
OF_DATA = [name for name in READERS if name != "read_manifest"]
OUTSIDE = ["../secret", "{folder}/../secret", "a/../../secret", "", ".", ".."]
ERRORS = (CheckpointError, CheckpointException)


class Holder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(3, 2))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "c", {"model/w": torch.arange(6.0).reshape(3, 2)}, {})
    (tmp_path / "secret").write_bytes(b"a secret of this machine")
    return tmp_path / "c"


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest as someone would who also mends its checksum."""
    content = json.loads((folder / NAME).read_text())
    content.pop("checksum")
    change(content)
    (folder / NAME).write_bytes(sealed(content))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are opened."""
    found: list[str] = []
    real = os.open

    def recorded(path: Any, *args: Any, **kwargs: Any) -> int:
        found.append(os.path.basename(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", recorded)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("reader", READERS)
def test_a_name_that_leaves_the_folder_is_refused_unopened(
    folder: Path, opened: list[str], reader: str, name: str
) -> None:
    name = name.format(folder=folder)
    entry = {"bytes": 24, "header_bytes": 8, "header_crc32": 7}
    rewrite(folder, lambda content: content["files"].update({name: entry}))
    with pytest.raises(ERRORS, match=r"expected a file name like rank-00000\.safetensors"):
        READERS[reader](folder)
    assert opened
    assert set(opened) == {NAME}


def test_the_command_prints_nothing_of_a_file_outside(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {"bytes": 24, "header_bytes": 8, "header_crc32": 7}
    rewrite(folder, lambda content: content["files"].update({"../secret": entry}))
    for action in ("verify", "inspect"):
        assert main(["checkpoint", action, str(folder)]) == 1
        text = capsys.readouterr()
        assert "expected a file name" in text.err
        assert "checksum" not in text.err + text.out


@pytest.mark.timeout(20)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["link", "inner link", "pipe", "device", "folder"])
@pytest.mark.parametrize("reader", OF_DATA)
def test_a_data_file_that_is_none_is_refused(folder: Path, reader: str, kind: str) -> None:
    path = folder / FILE
    path.rename(folder / "aside")
    if kind == "link":
        path.symlink_to(folder.parent / "secret")
    elif kind == "inner link":
        path.symlink_to("aside")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(ERRORS, match=FILE):
        READERS[reader](folder)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["link", "pipe", "device", "folder"])
def test_a_manifest_that_is_no_file_is_refused(folder: Path, kind: str) -> None:
    path = folder / NAME
    path.rename(folder.parent / "aside")
    if kind == "link":
        path.symlink_to(folder.parent / "aside")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        read_manifest(folder)
