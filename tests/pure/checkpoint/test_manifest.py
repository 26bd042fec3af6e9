import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint.checksum import Checksum
from shoal.checkpoint.disk import checkpoint_at
from shoal.checkpoint.manifest import (
    NAME,
    Manifest,
    StoredFile,
    StoredRegion,
    TensorEntry,
    check_json,
    fingerprint,
    read_manifest,
    sealed,
    write_manifest,
)
from shoal.errors import CheckpointError
from shoal.layout.region import Region

FILE = "rank-00000.safetensors"


def stored(
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    crc32: int = 7,
    name: str = "w",
    dtype: torch.dtype = torch.bfloat16,
) -> StoredRegion:
    region = Region(offsets=offsets, sizes=sizes)
    return StoredRegion(name=name, dtype=dtype, file=FILE, start=16, region=region, crc32=crc32)


def manifest() -> Manifest:
    return Manifest(
        world_size=2,
        files={FILE: StoredFile(num_bytes=100, header_bytes=16, header_crc32=9)},
        tensors={
            "w": TensorEntry(
                shape=(4, 3),
                dtype=torch.bfloat16,
                regions=(stored((0, 0), (3, 3)), stored((3, 0), (1, 3))),
            ),
            "s": TensorEntry(
                shape=(),
                dtype=torch.int64,
                regions=(stored((), (), name="s", dtype=torch.int64),),
            ),
            "e": TensorEntry(shape=(0, 5), dtype=torch.float32, regions=()),
        },
        extra={"step": 3, "ratio": 0.1, "name": "å/…", "nested": {"a": [1, None, True, {}]}},
    )


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest as someone would who also mends its checksum."""
    content = json.loads((folder / NAME).read_text())
    content.pop("checksum")
    change(content)
    (folder / NAME).write_bytes(sealed(content))


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    write_manifest(checkpoint_at(tmp_path), manifest())
    assert read_manifest(tmp_path) == manifest()
    assert fingerprint(read_manifest(tmp_path)) == fingerprint(manifest())


def test_a_flipped_bit_of_any_byte_is_found(tmp_path: Path) -> None:
    write_manifest(checkpoint_at(tmp_path), manifest())
    path = tmp_path / NAME
    data = path.read_bytes()
    for index in range(len(data)):
        damaged = bytearray(data)
        damaged[index] ^= 1 << index % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"manifest\.json: "):
            read_manifest(tmp_path)


def test_the_version_before_is_read_with_plain_checksums(tmp_path: Path) -> None:
    write_manifest(checkpoint_at(tmp_path), manifest())

    def back(content: dict[str, Any]) -> None:
        content["version"] = 2
        assert content.pop("checksums") == "folded-crc32"

    rewrite(tmp_path, back)
    assert read_manifest(tmp_path) == replace(manifest(), checksum=Checksum.PLAIN)


def test_every_truncation_is_found(tmp_path: Path) -> None:
    write_manifest(checkpoint_at(tmp_path), manifest())
    path = tmp_path / NAME
    data = path.read_bytes()
    for length in range(0, len(data), 5):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            read_manifest(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04\x95pickle",
        b"null",
        b"[]",
        b"{}",
        b'{"format": "other"}',
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"format": NaN}',
        b'{"n": 1' + b"0" * 10_000 + b"}",
        '{"format": "shoal-checkpoint"}'.encode("utf-16"),
        b"\xff\xfe\x00",
    ],
    ids=range(12),
)
def test_garbage_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    (tmp_path / NAME).write_bytes(data)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        read_manifest(tmp_path)


def test_the_same_key_twice_is_refused(tmp_path: Path) -> None:
    write_manifest(checkpoint_at(tmp_path), manifest())
    text = (tmp_path / NAME).read_text()
    (tmp_path / NAME).write_text(text.replace('"step":3', '"step":3,"step":3'))
    with pytest.raises(CheckpointError, match="the same key twice"):
        read_manifest(tmp_path)


def test_another_version_says_which(tmp_path: Path) -> None:
    write_manifest(checkpoint_at(tmp_path), manifest())
    rewrite(tmp_path, lambda content: content.update(version=99))
    with pytest.raises(
        CheckpointError, match=r"format version 99, but this shoal reads versions 2 and 3"
    ):
        read_manifest(tmp_path)


def region(content: dict[str, Any]) -> dict[str, Any]:
    return content["tensors"]["w"]["regions"][0]


@pytest.mark.parametrize(
    "change",
    [
        lambda c: region(c).update(file="../rank-00000.safetensors"),
        lambda c: region(c).update(file="/etc/passwd"),
        lambda c: region(c).update(file="sub/rank-00000.safetensors"),
        lambda c: region(c).update(file=".."),
        lambda c: region(c).update(file=""),
        lambda c: region(c).update(file="rank-00000.safetensors\n"),
        lambda c: region(c).update(file="rank-00000.safetensors\0"),
        lambda c: region(c).update(file=7),
        lambda c: region(c).update(start=None),
        lambda c: region(c).update(start=15),
        lambda c: region(c).update(start=99),
        lambda c: region(c).update(start=2**80),
        lambda c: c["files"].clear(),
        lambda c: c["files"][FILE].update(header_bytes=10**12),
        lambda c: c["files"][FILE].update(bytes=-1),
        lambda c: c["files"][FILE].pop("header_crc32"),
        lambda c: c["tensors"]["w"].update(layout=3),
        lambda c: region(c).update(crc32=-1),
        lambda c: region(c).update(crc32=2**32),
        lambda c: region(c).update(crc32=True),
        lambda c: region(c).update(crc32=1.0),
        lambda c: region(c).update(offsets=[0]),
        lambda c: region(c).update(offsets=[-1, 0]),
        lambda c: region(c).update(offsets=[0, True]),
        lambda c: region(c).update(offsets=[2**63, 0]),
        lambda c: region(c).update(offsets="00"),
        lambda c: region(c).update(offsets=[2, 0]),
        lambda c: region(c).update(sizes=[3, 4]),
        lambda c: region(c).update(sizes=[0, 3]),
        lambda c: region(c).update(sizes=[10**30, 3]),
        lambda c: region(c).pop("sizes"),
        lambda c: c["tensors"]["w"].update(shape=[4, 4]),
        lambda c: c["tensors"]["w"].update(shape=[10**18, 10**18]),
        lambda c: c["tensors"]["w"].update(shape=None),
        lambda c: c["tensors"]["w"].update(dtype="float31"),
        lambda c: c["tensors"]["w"].update(dtype=["float32"]),
        lambda c: c["tensors"]["w"].update(regions={}),
        lambda c: c["tensors"]["w"]["regions"].append(7),
        lambda c: c["tensors"]["w"]["regions"].pop(),
        lambda c: c["tensors"]["w"]["regions"].append(region(c)),
        lambda c: c["tensors"].update(w=[]),
        lambda c: c["tensors"]["e"].update(shape=[0, 2**62, 2**62]),
        lambda c: c["tensors"].update({str(i): c["tensors"]["w"] for i in range(4)}),
        lambda c: c.update(tensors=[]),
        lambda c: c.update(world_size=0),
        lambda c: c.update(world_size="2"),
        lambda c: c.update(extra=[]),
        lambda c: c.pop("extra"),
        lambda c: c.update(format="shoal-checkpoint-2"),
        lambda c: c.update(checksums="md5"),
        lambda c: c.update(checksums=None),
        lambda c: c.pop("checksums"),
    ],
)
def test_wrong_content_with_a_right_checksum_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    write_manifest(checkpoint_at(tmp_path), manifest())
    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError, match=r"manifest\.json: "):
        read_manifest(tmp_path)


def test_what_is_not_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent: the folder does not exist"):
        read_manifest(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"not a checkpoint: it holds no manifest") as raised:
        read_manifest(tmp_path)
    assert "delete" not in str(raised.value)
    (tmp_path / FILE).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"not a complete checkpoint: it holds no manifest"):
        read_manifest(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"is a file; a checkpoint is a folder"):
        read_manifest(tmp_path / "file")
    (tmp_path / NAME).mkdir()
    with pytest.raises(CheckpointError, match="holds no manifest"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": {"b": [1, torch.zeros(2)]}}, r"extra\['a'\]\['b'\]\[1\] is a Tensor"),
        ({"a": float("nan")}, r"extra\['a'\] is nan"),
        ({"a": {1: 2}}, r"extra\['a'\] has the key 1"),
        ({"a": {3}}, r"extra\['a'\] is a set"),
        ({"a": b"x"}, r"extra\['a'\] is a bytes"),
    ],
)
def test_values_that_json_would_change_are_refused(value: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_json(value)
