"""`shoal checkpoint` from the command line."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from shoal.checkpoint import read_manifest, save
from shoal.checkpoint.manifest import NAME, sealed
from shoal.cli.main import main


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tensors = {"model/w": torch.arange(6.0).reshape(3, 2), "optimizer/w/m": torch.ones(3, 2)}
    save(tmp_path / "c", tensors, {"training": {"step": 4}})
    return tmp_path / "c"


def test_inspect(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", str(saved)]) == 0
    text = capsys.readouterr().out
    for part in ("model/w", "float32", "3×2", "plain", "2 tensors, 48 bytes", '{"step": 4}'):
        assert part in text
    assert main(["checkpoint", "inspect", "--json", str(saved)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tensors"]["model/w"]["shape"] == [3, 2]
    assert found["extra"] == {"training": {"step": 4}}


def test_verify(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(saved)]) == 0
    assert "2 tensors are as they were saved" in capsys.readouterr().out
    path = saved / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["checkpoint", "verify", str(saved)]) == 1
    assert "rank-00000.safetensors: tensor 'optimizer/w/m'" in capsys.readouterr().err


def test_export_import_reshard(saved: Path, tmp_path: Path) -> None:
    there = tmp_path / "hf"
    assert main(["checkpoint", "export", str(saved), str(there), "--dtype", "bfloat16"]) == 0
    assert load_file(there / "model.safetensors")["w"].dtype == torch.bfloat16
    assert main(["checkpoint", "import", str(there), str(tmp_path / "back")]) == 0
    assert read_manifest(tmp_path / "back").tensors.keys() == {"model/w"}
    assert main(["checkpoint", "reshard", str(saved), str(tmp_path / "two"), "--ranks", "2"]) == 0
    assert read_manifest(tmp_path / "two").world_size == 2
    assert main(["checkpoint", "reshard", str(saved), str(tmp_path / "two"), "--ranks", "2"]) == 1


@pytest.mark.filterwarnings("ignore")
def test_import_of_dcp(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert main(["checkpoint", "import", str(tmp_path / "dcp"), str(tmp_path / "c")]) == 0
    assert read_manifest(tmp_path / "c").tensors.keys() == {"w"}


EVIL = "\x1b]0;owned\x07[red]x[/red][/none]:smile:\u202e\x9b2J\ud800\x7f\rend"


def assert_harmless(text: str) -> None:
    assert all(c.isprintable() or c == "\n" for c in text), ascii(text)


def test_names_reach_the_terminal_as_letters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "c", {"x": torch.ones(2)}, {"training": {EVIL: EVIL}, "note": EVIL})
    content = json.loads((tmp_path / "c" / NAME).read_text())
    content.pop("checksum")
    content["tensors"][EVIL] = content["tensors"].pop("x") | {"layout": EVIL}
    (tmp_path / "c" / NAME).write_bytes(sealed(content))
    assert main(["checkpoint", "inspect", str(tmp_path / "c")]) == 0
    text = capsys.readouterr().out
    assert_harmless(text)
    seen = "".join(text.split())
    assert "[red]x[/red][/none]:smile:" in seen
    assert main(["checkpoint", "inspect", "--json", str(tmp_path / "c")]) == 0
    text = capsys.readouterr().out
    assert_harmless(text)
    assert EVIL in json.loads(text)["tensors"]
    path = tmp_path / "c" / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    for change in (lambda c: c, lambda c: c["tensors"][EVIL].update(dtype=EVIL)):
        change(content)
        (tmp_path / "c" / NAME).write_bytes(sealed(content))
        assert main(["checkpoint", "verify", str(tmp_path / "c")]) == 1
        text = capsys.readouterr()
        assert_harmless(text.out + text.err)
        assert "x1b]0;owned" in text.err


def test_a_folder_that_is_no_checkpoint_is_not_to_be_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "letters.txt").write_text("dear")
    for action in ("inspect", "verify"):
        assert main(["checkpoint", action, str(tmp_path)]) == 1
        text = capsys.readouterr().err
        assert "is not a checkpoint: it holds no manifest.json" in text
        assert "delete" not in text


@pytest.mark.parametrize("words", [[], ["inspekt", "x"], ["reshard", "a", "b"], ["verify"]])
def test_wrong_words(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", *words]) == 2
    assert capsys.readouterr().err.startswith("shoal: error: ")


def test_a_dtype_that_is_not_supported_is_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = b'{"a":{"dtype":"F8_E8M0","shape":[4],"data_offsets":[0,4]}}'
    (tmp_path / "in").mkdir()
    data = len(header).to_bytes(8, "little") + header + b"1234"
    (tmp_path / "in" / "model.safetensors").write_bytes(data)
    assert main(["checkpoint", "import", str(tmp_path / "in"), str(tmp_path / "out")]) == 1
    assert "importing tensors of F8_E8M0 is not supported" in capsys.readouterr().err
