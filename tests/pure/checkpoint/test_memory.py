"""Files from somebody else take no more memory than real ones of their length."""

import io
import itertools
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shoal.checkpoint import import_dcp, import_weights, read_manifest, save
from shoal.checkpoint.dcp_import import read_item, unpickle_metadata
from shoal.checkpoint.manifest import _seal, sealed
from shoal.errors import CheckpointError

NUM_BYTES = 8 << 20
SLACK_BYTES = 40 << 20


def peak_of(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def many(unit: str) -> str:
    return f"[{unit * (NUM_BYTES // len(unit))}0]"


def keys() -> str:
    found = (f'"{number:x}":0,' for number in itertools.count())
    return f'{{{"".join(itertools.islice(found, NUM_BYTES // 9))}"z":0}}'


HOSTILE = {
    **{unit: (lambda unit=unit: many(unit)) for unit in ("{},", "[],", "[[[[]]]],", '{"a":0},')},
    **{unit: (lambda unit=unit: many(unit)) for unit in ('"ab",', "999,", "0.5,", "0,")},
    '{"crc32":0},': lambda: many('{"crc32":0},'),
    "keys": keys,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_manifest_of_small_values(tmp_path: Path, text: Callable[[], str]) -> None:
    head = '{"checksums":"folded-crc32","extra":{"x":'
    rest = '},"files":{},"format":"shoal-checkpoint","tensors":{},"version":3,"world_size":1'
    body = f"{head}{text()}{rest}".encode()
    (tmp_path / "manifest.json").write_bytes(body + _seal(body))

    def read() -> None:
        with suppress(CheckpointError):  # some of them take little enough to be read
            read_manifest(tmp_path)

    assert peak_of(read) < 11 * len(body) + SLACK_BYTES


def manifest(num_regions: int) -> dict[str, object]:
    regions = [
        {
            "crc32": 4_000_000_000 + index,
            "file": "rank-00000.safetensors",
            "offsets": [index, 0],
            "sizes": [1, 64],
            "start": 8 + 256 * index,
        }
        for index in range(num_regions)
    ]
    entry = {"dtype": "float32", "layout": "plain", "regions": regions, "shape": [num_regions, 64]}
    end = 8 + 256 * num_regions
    file = {"bytes": end, "header_bytes": 8, "header_crc32": 0}
    return {
        **{"format": "shoal-checkpoint", "version": 3, "world_size": 1, "extra": {}},
        **{"files": {"rank-00000.safetensors": file}, "tensors": {"w": entry}},
        "checksums": "folded-crc32",
    }


def test_a_real_manifest_of_that_length_is_read(tmp_path: Path) -> None:
    data = sealed(manifest(20_000))
    (tmp_path / "manifest.json").write_bytes(data)
    assert len(read_manifest(tmp_path).tensors["w"].regions) == 20_000


def test_many_small_tensors_are_saved_and_read(tmp_path: Path) -> None:
    save(tmp_path / "c", {f"t{index}": torch.ones(()) for index in range(3000)}, {})
    assert len(read_manifest(tmp_path / "c").tensors) == 3000


def test_what_would_not_be_read_back_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"too many small values.* Save large tables as ten"):
        save(tmp_path / "c", {}, {"table": [[]] * 2_000_000})
    assert list(tmp_path.iterdir()) == []


def test_an_index_of_small_values(tmp_path: Path) -> None:
    text = '{"weight_map":{"w":' + many("{},") + "}}"
    (tmp_path / "model.safetensors.index.json").write_text(text)

    def read() -> None:
        with pytest.raises(CheckpointError, match="too many small values"):
            import_weights(tmp_path, tmp_path / "out")

    assert peak_of(read) < 11 * len(text) + SLACK_BYTES


def text_of(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


PATH = text_of("pathlib") + b"q\x00" + text_of("PosixPath") + b"q\x01"
COUNT = 1 << 17
PICKLES = {
    "memo": b"Nr\xff\xff\xff\x7f.",
    "memo as text": b"Np2147483646\n.",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 31) + b".",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 31) + b".",
    "text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 31) + b".",
    "number": b"\x8b" + struct.pack("<i", (1 << 31) - 1) + b".",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 31) + b".",
    "lists": b"]" * COUNT,
    "tables": b"}" * COUNT,
    "sets": b"\x8f" * COUNT,
    "marks": b"(" * COUNT,
    "tuples": b")" + b"\x85" * COUNT,
    "remembered": b"N" + b"\x94" * COUNT,
    "recalled": b"Nq\x00" + b"h\x00" * (COUNT // 2),
    "again": b"N" + b"2" * COUNT,
    "names": PATH + b"h\x00h\x01\x93" * (COUNT // 5),
    "records": PATH + b"h\x00h\x01\x93q\x02" + b"h\x02)R" * (COUNT // 4),
    "copies": b"ctorch\nSize\nq\x00]q\x01(" + b"N" * 1000 + b"e" + b"h\x00h\x01\x85R" * 1000,
    "copied tuples": b"ctorch\nSize\nq\x00(" + b"N" * 1000 + b"tq\x01" + b"h\x00h\x01R" * 1000,
    "numbers": b"M\xff\xff" * (COUNT // 3),
    "a key within keys": b"})" + b"\x85" * 20_000 + b"Ns.",
}


@pytest.mark.parametrize("data", PICKLES.values(), ids=PICKLES.keys())
def test_metadata_of_dcp_that_asks_for_memory(tmp_path: Path, data: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(data)

    def read() -> None:
        with pytest.raises(CheckpointError):
            import_dcp(tmp_path, tmp_path / "out")

    assert peak_of(read) < 22 * len(data) + (2 << 20)


def metadata(num_tensors: int) -> Metadata:
    entries, places = {}, {}
    for number in range(num_tensors):
        name = f"model.layers.{number}.attention.wq.weight"
        chunks = [ChunkStorageMetadata(torch.Size((8 * c, 0)), torch.Size((8, 4))) for c in (0, 1)]
        size = torch.Size((16, 4))
        entries[name] = TensorStorageMetadata(TensorProperties(), size, chunks)
        for index, chunk in enumerate(chunks):
            place = _StorageInfo(f"__{index}_0.distcp", 4096 * number, 4096)
            places[MetadataIndex(name, chunk.offsets, index)] = place
    paths = {name: ("model", name) for name in entries}
    return Metadata(entries, planner_data=paths, storage_data=places)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_real_metadata_of_any_length_is_read(protocol: int) -> None:
    for num_tensors in (1, 300, 3000):
        found = unpickle_metadata(pickle.dumps(metadata(num_tensors), protocol=protocol))
        assert len(found["state_dict_metadata"]) == num_tensors
        assert len(found["storage_data"]) == 2 * num_tensors


def test_a_chunk_that_is_listed_without_end_is_refused(tmp_path: Path) -> None:
    shared = metadata(1)
    [entry] = shared.state_dict_metadata.values()
    assert isinstance(entry, TensorStorageMetadata)
    entry.chunks = entry.chunks * 10_000
    shared.state_dict_metadata = {f"t{number}": entry for number in range(1000)}
    data = pickle.dumps(shared)
    (tmp_path / ".metadata").write_bytes(data)

    def read() -> None:
        with pytest.raises(CheckpointError, match="listed twice, or in no file"):
            import_dcp(tmp_path, tmp_path / "out")

    assert peak_of(read) < 22 * len(data) + (2 << 20)


@pytest.mark.filterwarnings("ignore")
def test_bytes_that_many_chunks_show_are_refused(tmp_path: Path) -> None:
    dcp.save({"w": torch.zeros(1 << 16)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    shown = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    [where] = shown.storage_data.values()
    starts = [torch.Size([number << 16]) for number in range(100)]
    shown.storage_data = {MetadataIndex("w", start): where for start in starts}
    entry = shown.state_dict_metadata["w"]
    entry.size = torch.Size([100 << 16])
    entry.chunks = [ChunkStorageMetadata(start, torch.Size([1 << 16])) for start in starts]
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(shown))
    with pytest.raises(CheckpointError, match="listed more than once"):
        import_dcp(tmp_path / "dcp", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


def doubled(value: object) -> object:
    for _ in range(60):
        value = [value, value]
    return value


def holding_itself() -> object:
    value: list[object] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value",
    [doubled([1]), doubled({"a": "b"}), ["x" * 10_000] * 1000, holding_itself()],
    ids=["lists", "tables", "texts", "itself"],
)
def test_an_item_without_end_is_refused(tmp_path: Path, value: object) -> None:
    torch.save(value, tmp_path / "item")
    with pytest.raises(CheckpointError, match="without end"):
        read_item((tmp_path / "item").read_bytes())


def test_an_item_that_nests_too_deeply_is_refused() -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + b"]" * 3000 + b"a" * 2999 + b".")
    with pytest.raises(CheckpointError, match="without end"):
        read_item(data.getvalue())


def test_an_item_whose_parts_are_shared_is_read(tmp_path: Path) -> None:
    value = [[1, "a", {"b": 0.5}]] * 1000
    torch.save(value, tmp_path / "item")
    assert read_item((tmp_path / "item").read_bytes()) == value


class Zeros:
    def __reduce__(self) -> tuple[type, tuple[int]]:
        return bytearray, (1 << 31,)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("value", [Zeros(), torch.ones(1).expand(1 << 29), {1, 2}], ids=str)
def test_an_item_that_takes_more_than_its_length_is_refused(tmp_path: Path, value: object) -> None:
    torch.save(value, tmp_path / "item")
    data = (tmp_path / "item").read_bytes()
    assert len(data) < 10_000

    def read() -> None:
        with pytest.raises(CheckpointError, match="not readable as a saved tensor"):
            read_item(data)

    assert peak_of(read) < 2 << 20


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint16])
def test_items_of_dcp_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.arange(6).reshape(2, 3).to(dtype)
    state = {"w": value, "p": torch.nn.Parameter(torch.ones(2)), "n": [1, {"a": None}], "f": 0.5}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    import_dcp(tmp_path / "dcp", tmp_path / "c")
    found = read_manifest(tmp_path / "c")
    assert found.tensors.keys() == {"w", "p"}
    assert found.tensors["w"].dtype == dtype
    assert "f" in found.extra["values"]  # pyright: ignore[reportOperatorIssue]
