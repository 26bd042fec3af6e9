import importlib
import json
import os
import random
import resource
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from shoal.checkpoint import data_files, latest, load, save, step_folder
from shoal.checkpoint.manifest import CODES, NAME
from shoal.errors import CheckpointError

FILE = "rank-00000.safetensors"
DTYPES = list(CODES)


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "weight": torch.randn(6, 4),
        "bias": torch.randn(5, dtype=torch.float64),
        "half/precision.x": torch.randn(3, 2).bfloat16(),
        "scalar": torch.tensor(41),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 3),
    }


def blank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(bits(found[name]), bits(tensor)), name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_nothing_left(folder: Path) -> None:
    assert list(folder.iterdir()) == []


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    save(folder, some_tensors(), {"step": 7})
    return folder


def test_round_trip(saved: Path) -> None:
    target = blank(some_tensors())
    assert load(saved, target) == {"step": 7}
    assert_same(target, some_tensors())
    assert sorted(path.name for path in saved.iterdir()) == [NAME, FILE]
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.integers(0, 7), max_size=4),
    dtype=st.sampled_from(DTYPES),
    block_bytes=st.integers(1, 64),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_dtype_in_blocks_of_any_size(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: list[int],
    dtype: torch.dtype,
    block_bytes: int,
    seed: int,
) -> None:
    monkeypatch.setattr(data_files, "REGION_BYTES", block_bytes)
    random.seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    data = [random.randrange(2 if dtype == torch.bool else 256) for _ in range(count)]
    values = torch.tensor(data, dtype=torch.uint8).view(dtype).reshape(shape)
    folder = tmp_path / f"{random.getrandbits(64):x}-{len(list(tmp_path.iterdir()))}"
    save(folder, {"a": values, "b": torch.ones(3, dtype=torch.float64)}, {})
    target = {"a": torch.zeros_like(values), "b": torch.zeros(3, dtype=torch.float64)}
    load(folder, target)
    assert torch.equal(bits(target["a"]), bits(values))


def test_views_and_parameters_are_saved_and_filled_in_place(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    parameter = torch.nn.Parameter(torch.full((2,), 3.0))
    save(tmp_path / "c", {"turned": base.t(), "parameter": parameter}, {})
    target = torch.zeros(3, 4)
    leaf = torch.nn.Parameter(torch.zeros(2))
    version = leaf._version
    load(tmp_path / "c", {"turned": target.t(), "parameter": leaf})
    assert torch.equal(target, base)
    assert torch.equal(leaf, parameter)
    assert leaf.is_leaf
    assert leaf.requires_grad
    assert leaf._version > version


def test_any_safetensors_reader_opens_the_file(saved: Path) -> None:
    found = load_file(saved / FILE)
    expected = some_tensors()
    assert torch.equal(found["weight@0,0"], expected["weight"])
    assert torch.equal(found["scalar@"], expected["scalar"])
    assert torch.equal(found["half/precision.x@0,0"], expected["half/precision.x"])


def test_blocks_start_at_multiples_of_their_element_size(saved: Path) -> None:
    data = (saved / FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    sizes = {code: dtype.itemsize for dtype, code in CODES.items()}
    assert length % 8 == 0
    assert {fields["dtype"] for fields in table.values()} == {"F64", "I64", "F32", "BF16", "BOOL"}
    for fields in table.values():
        assert fields["data_offsets"][0] % sizes[fields["dtype"]] == 0


def test_a_checkpoint_is_never_overwritten_nor_its_replacement_begun(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> None:
        raise AssertionError("begun")

    monkeypatch.setattr(importlib.import_module("shoal.checkpoint.save"), "write_regions", write)
    before = (saved / FILE).read_bytes()
    with pytest.raises(CheckpointError, match=r"saved exists already"):
        save(saved, some_tensors(), {"step": 8})
    assert (saved / FILE).read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


def test_an_empty_folder_is_no_checkpoint_yet(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    save(tmp_path / "c", some_tensors(), {"step": 1})
    assert load(tmp_path / "c", blank(some_tensors())) == {"step": 1}
    (tmp_path / "d").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "d")
    with pytest.raises(CheckpointError, match="link exists already"):
        save(tmp_path / "link", some_tensors(), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "d", "link"]


def test_no_tensors_at_all(tmp_path: Path) -> None:
    save(tmp_path / "c", {}, {"only": "extra"})
    assert load(tmp_path / "c", {}) == {"only": "extra"}


@pytest.mark.parametrize(
    ("tensors", "extra", "error", "message"),
    [
        ({"x": 3}, {}, CheckpointError, "'x' is a int"),
        ({"x": torch.empty(2, device="meta")}, {}, NotImplementedError, "'x'.*meta"),
        ({"x": torch.eye(2).to_sparse()}, {}, NotImplementedError, "'x'.*sparse_coo"),
        ({"x": torch.zeros(2, dtype=torch.complex128)}, {}, NotImplementedError, "complex128"),
        ({"x": torch.zeros(2)}, {"a": torch.zeros(1)}, CheckpointError, r"extra\['a'\]"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(
    tmp_path: Path, tensors: dict, extra: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        save(tmp_path / "c", tensors, extra)
    assert_nothing_left(tmp_path)


def test_a_file_that_cannot_grow_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(CheckpointError, match=rf"cannot write .*{FILE}: File too large"):
            save(tmp_path / "c", {"x": torch.zeros(100_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_nothing_left(tmp_path)


def test_a_full_disk_says_how_much_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        CheckpointError,
        match=rf"cannot write .*{FILE}: No space left on device\. "
        r"[\d,]+ bytes are needed, [\d,]+ bytes are free there",
    ):
        save(tmp_path / "c", some_tensors(), {})
    assert_nothing_left(tmp_path)


def test_a_crash_before_the_rename_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        save(step_folder(tmp_path, 1), some_tensors(), {})
    assert_nothing_left(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot make .*file"):
        save(tmp_path / "file" / "c", some_tensors(), {})


def flips(size: int, count: int) -> list[tuple[int, int]]:
    """Bits spread over a file, header and data."""
    choose = random.Random(3)
    return [(choose.randrange(size), choose.randrange(8)) for _ in range(count)]


def test_flipped_bits_of_the_data_file_are_found_before_anything_is_written(
    saved: Path,
) -> None:
    path = saved / FILE
    data = path.read_bytes()
    for index, bit in flips(len(data), 60):
        damaged = bytearray(data)
        damaged[index] ^= 1 << bit
        path.write_bytes(damaged)
        target = blank(some_tensors())
        with pytest.raises(CheckpointError, match=rf"{FILE}: tensor '.*(damaged|incomplete)"):
            load(saved, target, verify_first=True)
        assert_same(target, blank(some_tensors()))


def test_every_truncation_of_the_data_file_is_found(saved: Path) -> None:
    path = saved / FILE
    data = path.read_bytes()
    for length in range(0, len(data), 23):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=rf"{FILE}: tensor '"):
            load(saved, blank(some_tensors()))
    path.write_bytes(data + b"\0")
    with pytest.raises(CheckpointError, match=rf"{FILE}: tensor '"):
        load(saved, blank(some_tensors()))


def test_a_missing_data_file_is_named(saved: Path) -> None:
    (saved / FILE).unlink()
    with pytest.raises(CheckpointError, match=rf"{FILE}: tensor 'bias' cannot be read: No such"):
        load(saved, blank(some_tensors()))


def test_a_folder_in_place_of_the_data_file(saved: Path) -> None:
    (saved / FILE).unlink()
    (saved / FILE).mkdir()
    with pytest.raises(CheckpointError, match=FILE):
        load(saved, blank(some_tensors()))


def test_files_of_another_checkpoint_are_found(saved: Path, tmp_path: Path) -> None:
    changed = some_tensors()
    changed["weight"][0, 0] += 1
    save(tmp_path / "other", changed, {"step": 7})
    (saved / FILE).write_bytes((tmp_path / "other" / FILE).read_bytes())
    with pytest.raises(CheckpointError, match=r"tensor 'weight' at \(0, 0\) has checksum"):
        load(saved, blank(some_tensors()))


def test_what_does_not_fit_is_told_in_one_short_error(saved: Path) -> None:
    target = blank(some_tensors())
    target["weight"] = torch.zeros(6, 5)
    target["bias"] = torch.zeros(5)
    del target["flags"]
    target |= {f"new.{index}": torch.zeros(1) for index in range(9)}
    with pytest.raises(CheckpointError) as raised:
        load(saved, target)
    text = str(raised.value)
    for expected in (
        "9 not in the checkpoint: 'new.0'; 'new.1'; 'new.2'; and 6 more",
        "1 only in the checkpoint: 'flags'",
        "1 of another shape: 'weight' is (6, 4) there, (6, 5) here",
        "1 of another dtype: 'bias' is torch.float64 there, torch.float32 here",
        "Build the model and optimizer as they were",
    ):
        assert expected in text
    assert len(text.splitlines()) <= 12
    assert not target["scalar"].any()


def test_latest_is_the_highest_complete_step(tmp_path: Path) -> None:
    assert latest(tmp_path / "absent") is None
    assert latest(tmp_path) is None
    for step in (20, 9, 123_456_789, 100):
        save(step_folder(tmp_path, step), {}, {})
    (tmp_path / "step-99999999999").mkdir()
    (tmp_path / ".step-999999999999.saving-00aa").mkdir()
    (tmp_path / "step-888888888888").write_text("a file")
    save(tmp_path / "best", {}, {})
    assert latest(tmp_path) == tmp_path / "step-123456789"
    assert step_folder(tmp_path, 9).name == "step-00000009"
