"""Checksums of folded bytes: what they find, and checkpoints from before there were any."""

import json
import random
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.checkpoint import load, read_manifest, save, verify
from shoal.checkpoint.checksum import CHUNK_BYTES, Checksum
from shoal.checkpoint.manifest import NAME, sealed
from shoal.errors import CheckpointError

ROW_BYTES = 8 * 2039
PAGE_BYTES = 4096
SIZES = [1, 7, ROW_BYTES, 2 * ROW_BYTES - 1, 2 * ROW_BYTES, 5 * ROW_BYTES + 3, CHUNK_BYTES]
SIZES += [CHUNK_BYTES + 5, 2 * CHUNK_BYTES + 3 * ROW_BYTES + 11]


def noise(size: int) -> bytearray:
    return bytearray(np.random.default_rng(size).bytes(size))


def folded(data: bytes) -> int:
    """The definition, byte by byte of a row."""
    found = 0
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES]
        if len(chunk) < 2 * ROW_BYTES:
            found = zlib.crc32(chunk, found)
            continue
        row = 0
        for begin in range(0, len(chunk), ROW_BYTES):
            row ^= int.from_bytes(chunk[begin : begin + ROW_BYTES], "little")
        found = zlib.crc32(row.to_bytes(ROW_BYTES, "little"), found)
    return found


@pytest.mark.parametrize("size", SIZES)
def test_it_is_what_its_definition_says_wherever_the_bytes_lie(size: int) -> None:
    data = noise(size)
    expected = folded(data)
    assert Checksum.FOLDED.of(memoryview(data)) == expected
    assert Checksum.FOLDED.of(memoryview(b"123" + data)[3:]) == expected
    assert Checksum.PLAIN.of(memoryview(data)) == zlib.crc32(data)


@pytest.mark.parametrize("size", SIZES[4:])
def test_damage_within_thirty_two_bits_changes_it(size: int) -> None:
    choose = random.Random(size)
    data = noise(size)
    expected = Checksum.FOLDED.of(memoryview(data))
    for _ in range(60):
        damaged = bytearray(data)
        index = choose.randrange(size - 3)
        burst = int.from_bytes(data[index : index + 4], "little") ^ choose.randrange(1, 1 << 32)
        damaged[index : index + 4] = burst.to_bytes(4, "little")
        assert Checksum.FOLDED.of(memoryview(damaged)) != expected
        damaged[:] = data
        damaged[index] ^= 1 << choose.randrange(8)
        assert Checksum.FOLDED.of(memoryview(damaged)) != expected


def test_pages_that_changed_places_or_got_lost_change_it() -> None:
    data = noise(CHUNK_BYTES + 20 * PAGE_BYTES)
    expected = Checksum.FOLDED.of(memoryview(data))
    choose = random.Random(0)
    num_pages = len(data) // PAGE_BYTES
    for _ in range(60):
        one, other = sorted(choose.sample(range(num_pages), 2))
        first = slice(one * PAGE_BYTES, (one + 1) * PAGE_BYTES)
        second = slice(other * PAGE_BYTES, (other + 1) * PAGE_BYTES)
        for found in ((data[second], data[first]), (data[second], data[second])):
            damaged = bytearray(data)
            damaged[first], damaged[second] = found
            assert Checksum.FOLDED.of(memoryview(damaged)) != expected
        damaged = bytearray(data)
        damaged[first] = bytes(PAGE_BYTES)
        assert Checksum.FOLDED.of(memoryview(damaged)) != expected


def test_damage_of_a_large_tensor_is_found(tmp_path: Path) -> None:
    values = torch.from_numpy(np.frombuffer(noise(2 * CHUNK_BYTES + 40), np.float32).copy())
    save(tmp_path / "c", {"x": values}, {})
    stored = read_manifest(tmp_path / "c").tensors["x"].regions[0]
    for byte in (0, CHUNK_BYTES - 1, CHUNK_BYTES, values.nbytes - 1):
        with (tmp_path / "c" / stored.file).open("r+b") as file:
            file.seek(stored.start + byte)
            [good] = file.read(1)
            file.seek(stored.start + byte)
            file.write(bytes([good ^ 16]))
            file.flush()
            target = torch.zeros_like(values)
            with pytest.raises(CheckpointError, match="tensor 'x'"):
                load(tmp_path / "c", {"x": target})
            with pytest.raises(CheckpointError, match="tensor 'x'"):
                verify(tmp_path / "c")
            assert not target.any()
            file.seek(stored.start + byte)
            file.write(bytes([good]))
    load(tmp_path / "c", {"x": target})
    assert torch.equal(target.view(torch.uint8), values.view(torch.uint8))


def test_a_checkpoint_of_the_version_before_loads(tmp_path: Path) -> None:
    values = torch.arange(300_000.0)
    save(tmp_path / "c", {"x": values}, {})
    content = json.loads((tmp_path / "c" / NAME).read_bytes())
    content.pop("checksum")
    content.pop("checksums")
    content["version"] = 2
    content["tensors"]["x"]["regions"][0]["crc32"] = zlib.crc32(values.numpy().tobytes())
    (tmp_path / "c" / NAME).write_bytes(sealed(content))
    target = torch.zeros_like(values)
    load(tmp_path / "c", {"x": target})
    assert torch.equal(target, values)
    content["tensors"]["x"]["regions"][0]["crc32"] ^= 1
    (tmp_path / "c" / NAME).write_bytes(sealed(content))
    with pytest.raises(CheckpointError, match="has checksum"):
        load(tmp_path / "c", {"x": target})
