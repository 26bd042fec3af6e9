"""`import_weights` takes each tensor from the file that the index names, or says what is wrong."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shoal.checkpoint import import_weights, load
from shoal.errors import CheckpointError

INDEX = "model.safetensors.index.json"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two files that both hold `w`, with other values."""
    folder = tmp_path / "in"
    folder.mkdir()
    save_file({"w": torch.full((3,), 1.0), "u": torch.ones(2)}, folder / "a.safetensors")
    save_file({"w": torch.full((3,), 2.0)}, folder / "b.safetensors")
    return folder


def index(folder: Path, **weights: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weights}))


def refuse(source: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        import_weights(source, source.parent / "out")
    assert not (source.parent / "out").exists()


@pytest.mark.parametrize(("file", "value"), [("a.safetensors", 1.0), ("b.safetensors", 2.0)])
def test_a_tensor_of_two_files_comes_from_the_one_that_the_index_names(
    source: Path, file: str, value: float
) -> None:
    index(source, w=file, u="a.safetensors")
    import_weights(source, source.parent / "out")
    found = {"model/w": torch.zeros(3), "model/u": torch.zeros(2)}
    load(source.parent / "out", found)
    assert torch.equal(found["model/w"], torch.full((3,), value))
    assert torch.equal(found["model/u"], torch.ones(2))


def test_a_tensor_that_no_file_holds_is_an_error(source: Path) -> None:
    index(source, w="a.safetensors", u="a.safetensors", gone="a.safetensors")
    refuse(source, r"names a\.safetensors for 'gone', and no file that it names holds it")


def test_a_tensor_that_another_file_holds_is_an_error(source: Path) -> None:
    index(source, w="b.safetensors", u="b.safetensors")
    refuse(source, r"names b\.safetensors for 'u', and no file")
    index(source, w="a.safetensors", u="b.safetensors")
    refuse(source, r"names b\.safetensors for 'u', but a\.safetensors holds it")


def test_a_tensor_that_the_index_does_not_name_is_an_error(source: Path) -> None:
    index(source, w="a.safetensors")
    refuse(source, r"a\.safetensors holds 'u', which .*index\.json does not name")


def test_files_that_the_index_does_not_name_are_left_alone(source: Path) -> None:
    (source / "b.safetensors").write_bytes(b"not read")
    index(source, w="a.safetensors", u="a.safetensors")
    import_weights(source, source.parent / "out")


def test_a_single_file_beside_an_index_of_others_is_an_error(source: Path) -> None:
    index(source, w="a.safetensors", u="a.safetensors")
    save_file({"w": torch.zeros(3)}, source / "model.safetensors")
    refuse(source, r"both .*index\.json and model\.safetensors")


def test_shards_without_an_index_and_pickles_are_named(source: Path) -> None:
    refuse(source, r"neither .* nor .*; it holds a\.safetensors")
    for path in source.iterdir():
        path.unlink()
    (source / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    refuse(source, r"pytorch_model\.bin is a pickle")


@pytest.mark.parametrize(
    "name",
    [
        *("../a.safetensors", "/etc/x.safetensors", "sub/a.safetensors", "..", "", "a.bin"),
        *("a\0.safetensors", "a.safetensors\n", ["a.safetensors"], 7, None),
    ],
)
def test_names_that_lead_elsewhere_are_refused(source: Path, name: object) -> None:
    (source / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    refuse(source, r"expected a file name like model-00001-of-00002\.safetensors")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["a.safetensors", INDEX, "model.safetensors"])
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder", "absent"])
def test_only_regular_files_of_the_folder_are_opened(source: Path, name: str, kind: str) -> None:
    if name != "model.safetensors":
        index(source, w="a.safetensors", u="a.safetensors")
    path = source / name
    if path.exists():
        path.rename(source.parent / "outside")
    else:
        save_file({"w": torch.zeros(3)}, source.parent / "outside")
    if kind == "link":
        path.symlink_to(source.parent / "outside")
    elif kind == "dangling":
        path.symlink_to(source.parent / "nowhere")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    refuse(source, str(source))
