"""Checkpoints verified, cut anew, exported and imported by one process."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.checkpoint import (
    data_files,
    export_weights,
    import_weights,
    load,
    load_model,
    read_manifest,
    reshard,
    save,
    verify,
)
from shoal.errors import CheckpointError, UsageError


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "model/0.weight": torch.randn(7, 4),
        "model/0.bias": torch.randn(7).bfloat16(),
        "model/count": torch.tensor(3),
        "optimizer/0.weight/exp_avg": torch.randn(7, 4),
    }


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(data_files, "REGION_BYTES", 32)
    save(tmp_path / "c", some_tensors(), {"step": 1})
    return tmp_path / "c"


def test_verify_reads_every_byte(saved: Path) -> None:
    told: list[int] = []
    manifest = verify(saved, told.append)
    assert sum(told) == manifest.num_bytes == 7 * 4 * 4 * 2 + 14 + 8
    path = saved / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    for index in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[index] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: "):
            verify(saved)


@pytest.mark.parametrize("num_files", [1, 2, 3, 9])
def test_reshard_keeps_every_value(saved: Path, tmp_path: Path, num_files: int) -> None:
    told: list[int] = []
    reshard(saved, tmp_path / "other", num_files, told.append)
    manifest = verify(tmp_path / "other")
    assert manifest.world_size == num_files
    assert sum(told) >= manifest.num_bytes
    assert len(manifest.files) == min(num_files, 7)
    found = {name: torch.zeros_like(tensor) for name, tensor in some_tensors().items()}
    assert load(tmp_path / "other", found) == {"step": 1}
    for name, tensor in some_tensors().items():
        assert torch.equal(found[name], tensor)
    with pytest.raises(UsageError, match="got 0"):
        reshard(saved, tmp_path / "none", 0)


def test_export_is_what_hugging_face_reads(saved: Path, tmp_path: Path) -> None:
    export_weights(saved, tmp_path / "one")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    export_weights(saved, tmp_path / "many", max_file_bytes=100)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 7 * 4 * 4 + 14 + 8
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    many: dict[str, torch.Tensor] = {}
    for file in files:
        many |= load_file(tmp_path / "many" / file)
    for found in (load_file(tmp_path / "one" / "model.safetensors"), many):
        assert found.keys() == {"0.weight", "0.bias", "count"}
        for name, tensor in found.items():
            assert torch.equal(tensor, some_tensors()[f"model/{name}"])
    export_weights(saved, tmp_path / "half", dtype=torch.float16)
    half = load_file(tmp_path / "half" / "model.safetensors")
    assert half["0.weight"].dtype == half["0.bias"].dtype == torch.float16
    assert half["count"].dtype == torch.int64
    with pytest.raises(CheckpointError, match="exists already"):
        export_weights(saved, tmp_path / "half")


def test_import_of_an_export_and_of_others(saved: Path, tmp_path: Path) -> None:
    export_weights(saved, tmp_path / "many", max_file_bytes=100)
    import_weights(tmp_path / "many", tmp_path / "back")
    found = {n: torch.zeros_like(t) for n, t in some_tensors().items() if n.startswith("model/")}
    assert load(tmp_path / "back", found) == {}
    assert all(torch.equal(tensor, some_tensors()[name]) for name, tensor in found.items())
    model = torch.nn.Linear(3, 2)
    (tmp_path / "theirs").mkdir()
    save_file(dict(model.state_dict()), tmp_path / "theirs" / "model.safetensors")
    import_weights(tmp_path / "theirs", tmp_path / "ours")
    other = torch.nn.Linear(3, 2)
    load_model(tmp_path / "ours", other)
    assert torch.equal(other.weight, model.weight)
    assert read_manifest(tmp_path / "ours").world_size == 1


@pytest.mark.parametrize(
    "index",
    [
        b'{"weight_map": {"w": "../model.safetensors"}}',
        b'{"weight_map": {"w": "/etc/passwd"}}',
        b'{"weight_map": {"w": ["model.safetensors"]}}',
        b'{"weight_map": {}}',
        b'{"weight_map": []}',
        b"[]",
        b"\x80\x04.",
        b'{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}',
        b'{"weight_map": {"w": "absent.safetensors"}}',
    ],
)
def test_a_hostile_index_is_refused(tmp_path: Path, index: bytes) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(CheckpointError):
        import_weights(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_file({"w": torch.zeros(2)}, tmp_path / "outside.safetensors")
    (tmp_path / "in" / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(CheckpointError, match="Links are not followed"):
        import_weights(tmp_path / "in", tmp_path / "out")
