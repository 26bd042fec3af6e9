"""torch's DCP: its planners on our files, and its files made into ours."""

import gc
import importlib
import io
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from shoal.checkpoint import (
    Checkpoint,
    DcpReader,
    DcpWriter,
    import_dcp,
    load,
    read_manifest,
    save,
    verify,
)
from shoal.checkpoint.disk import DiskStorage
from shoal.comm.local import run_local
from shoal.errors import CheckpointError


def state(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(21.0).reshape(7, 3) * value
    return {
        "model": {"w": distribute_tensor(whole, mesh, [Shard(0)]), "p": torch.ones(2) * value},
        "optim": {"lr": 0.5 * value, "steps": [1, 2], "name": "adam"},
    }


def expected() -> dict[str, torch.Tensor]:
    return {"model.w": torch.arange(21.0).reshape(7, 3), "model.p": torch.ones(2)}


def blank() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in expected().items()}


def assert_filled(found: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected().items():
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3), (3, 2)])
def test_dcp_saves_and_loads_our_files(tmp_path: Path, before: int, after: int) -> None:
    folder = tmp_path / "c"

    def write() -> None:
        dcp.save(state(1.0), storage_writer=DcpWriter(folder))

    def read() -> None:
        found = state(0.0)
        dcp.load(found, storage_reader=DcpReader(folder))
        assert torch.equal(found["model"]["w"].full_tensor(), expected()["model.w"])
        assert found["optim"] == {"lr": 0.5, "steps": [1, 2], "name": "adam"}

    run_local(before, write)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert verify(folder).world_size == before
    run_local(after, read)
    found = blank()
    load(folder, found)
    assert_filled(found)


def test_a_folder_that_is_there_is_taken_if_it_is_empty(tmp_path: Path) -> None:
    def body() -> None:
        dcp.save(state(1.0), storage_writer=DcpWriter(path=tmp_path / "c"))

    (tmp_path / "c").mkdir()
    run_local(2, body)
    assert verify(tmp_path / "c").world_size == 2
    with pytest.raises(CheckpointException, match="exists already"):
        run_local(2, body)


def fails_on_a_rank(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The error of a save that rank 1 cannot write its part of."""
    module = importlib.import_module("shoal.checkpoint.dcp_plugin")
    write = module.write_regions

    def full(partial: Checkpoint, rank: int, planned: Any) -> Any:
        if rank == 1:
            raise CheckpointError("no space left")
        return write(partial, rank, planned)

    monkeypatch.setattr(module, "write_regions", full)
    with pytest.raises(CheckpointException) as raised:
        run_local(3, lambda: dcp.save(state(1.0), storage_writer=DcpWriter(path)))
    return str(raised.value)


def fails_to_publish(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The error of a save whose name another one took meanwhile."""
    publish = DiskStorage.publish

    def late(self: DiskStorage, partial: str, name: str) -> None:
        (path / "x").mkdir(parents=True)
        publish(self, partial, name)

    monkeypatch.setattr(DiskStorage, "publish", late)
    with pytest.raises(CheckpointException) as raised:
        run_local(2, lambda: dcp.save(state(1.0), storage_writer=DcpWriter(path)))
    return str(raised.value)


def fails_on_a_value(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The error of a save of what JSON cannot hold."""
    with pytest.raises(CheckpointException) as raised:
        dcp.save({"a": {1, 2}}, storage_writer=DcpWriter(path), no_dist=True)
    return str(raised.value)


class Unfinished(DefaultSavePlanner):
    """Cannot finish the plan of one rank."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if dist.get_rank() == 1:
            raise ArithmeticError("no plan")
        return super().finish_plan(new_plan)


def fails_to_plan(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The error of a save whose planner fails on rank 1, of which DCP tells no writer."""

    def body() -> str:
        try:
            dcp.save(state(1.0), storage_writer=DcpWriter(path), planner=Unfinished())
        except CheckpointException as error:
            return str(error)
        return ""

    said = run_local(2, body)
    gc.collect()
    return said[0]


def test_a_writer_gives_up_what_its_last_save_left(tmp_path: Path) -> None:
    def body() -> None:
        writer = DcpWriter(tmp_path / "c")
        with pytest.raises(CheckpointException, match="no plan"):
            dcp.save(state(1.0), storage_writer=writer, planner=Unfinished())
        dcp.save(state(1.0), storage_writer=writer)

    run_local(2, body)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert verify(tmp_path / "c").world_size == 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("fails", "texts", "left"),
    [
        (fails_on_a_rank, ("no space left", "on rank 1"), []),
        (fails_to_plan, ("no plan",), []),
        (fails_to_publish, ("exists already",), ["c"]),
        (fails_on_a_value, ("not readable as a saved tensor",), []),
    ],
)
def test_a_save_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Any, texts: list[str], left: list[str]
) -> None:
    error = fails(tmp_path / "c", monkeypatch)
    assert all(text in error for text in texts), error
    assert [path.name for path in tmp_path.iterdir()] == left


def test_damage_is_found_when_dcp_loads(tmp_path: Path) -> None:
    def body() -> None:
        dcp.save(state(1.0), checkpoint_id=tmp_path / "c", storage_writer=DcpWriter())
        path = tmp_path / "c" / "rank-00000.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(CheckpointException, match=r"rank-00000\.safetensors: tensor"):
            dcp.load(state(0.0), checkpoint_id=tmp_path / "c", storage_reader=DcpReader())

    run_local(1, body)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    run_local(2, lambda: dcp.save(state(1.0), checkpoint_id=tmp_path / "dcp"))
    return tmp_path / "dcp"


def test_a_plain_dcp_checkpoint_becomes_ours(plain: Path, tmp_path: Path) -> None:
    import_dcp(plain, tmp_path / "c", rename=lambda name: name.replace("model.", "model/"))
    found = {name.replace(".", "/"): tensor for name, tensor in blank().items()}
    extra = load(tmp_path / "c", found)
    assert_filled({name.replace("/", "."): tensor for name, tensor in found.items()})
    values: Any = extra["values"]
    assert (values["optim.lr"], values["optim.name"]) == (0.5, "adam")
    assert read_manifest(tmp_path / "c").tensors["model/w"].layout == "from DCP"


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def hostile(outside: Path) -> list[bytes]:
    """Pickles that do something, or nothing that DCP does."""
    names = [
        ("builtins", "eval"),
        ("builtins", "exec"),
        ("builtins", "getattr"),
        ("os", "system"),
        ("posix", "system"),
        ("subprocess", "Popen"),
        ("torch", "load"),
        ("torch", "ops"),
        ("torch.serialization", "load"),
        ("torch.distributed.checkpoint.metadata", "os"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
        ("torch.distributed.checkpoint.filesystem", "FileSystem"),
        ("collections", "defaultdict"),
        ("functools", "partial"),
    ]
    argument = f"__import__('os').mkdir({str(outside)!r})"
    calls = [
        pickle.PROTO + b"\x04" + _text(module) + _text(name) + b"\x93" + _text(argument) + b"\x85R."
        for module, name in names
    ]
    metadata = _text("torch.distributed.checkpoint.metadata") + _text("Metadata") + b"\x93"
    return [
        *calls,
        pickle.dumps(Bomb(outside)),
        pickle.dumps({"a": Bomb(outside)}),
        b"",
        b"{}",
        b"\x80\x04.",
        b"\x80\x04N.",
        pickle.dumps({"state_dict_metadata": {}}),
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b".",
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b".",
        b"\x80\x04" + metadata + b".",
        b"\x80\x04" + metadata + b")R.",
        b"\x80\x04" + metadata + b"N}" + _text("__init__") + b"N\x73\x86b.",
        b"\x80\x04" + metadata + b")\x81}" + _text("state_dict_metadata") + b"Nsb.",
        b"(" * 100_000,
    ]


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def test_hostile_metadata_does_nothing(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    source = tmp_path / "in"
    source.mkdir()
    for data in hostile(outside):
        (source / ".metadata").write_bytes(data)
        with pytest.raises(CheckpointError, match="in: "):
            import_dcp(source, tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["in"], data


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("relative_path", "../outside.distcp"),
        ("relative_path", "/etc/passwd"),
        ("relative_path", 7),
        ("offset", -1),
        ("offset", 1 << 80),
        ("offset", None),
        ("length", 1 << 60),
        ("length", -5),
        ("length", 3),
    ],
)
def test_items_that_are_elsewhere_are_refused(
    plain: Path, tmp_path: Path, field: str, value: object
) -> None:
    metadata = pickle.loads((plain / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        setattr(info, field, value)
    (plain / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="dcp: "):
        import_dcp(plain, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


def test_an_item_that_runs_code_is_refused(plain: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    metadata = pickle.loads((plain / ".metadata").read_bytes())
    buffer = io.BytesIO()
    torch.save(Bomb(outside), buffer)
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, len(buffer.getvalue())
    for path in plain.glob("*.distcp"):
        path.write_bytes(buffer.getvalue())
    (plain / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="not readable as a saved tensor"):
        import_dcp(plain, tmp_path / "out")
    assert not outside.exists()


@pytest.mark.parametrize(
    "extra",
    [
        *({"values": value} for value in ([], 5, None, {"w": 1})),
        *({"paths": value} for value in ([], 5, None, {"w": 1}, {"w": []}, {"w": [{}]})),
        *({"paths": {"w": path}} for path in (["a", 10**9], ["a", -1], ["a"] * 200)),
    ],
    ids=str,
)
def test_values_and_paths_of_somebody_else_are_refused(tmp_path: Path, extra: Any) -> None:
    save(tmp_path / "c", {"w": torch.ones(2)}, extra)
    with pytest.raises(CheckpointError):
        DcpReader(tmp_path / "c").read_metadata()


@pytest.mark.filterwarnings("ignore")
def test_paths_through_lists_come_back(tmp_path: Path) -> None:
    state = {"a": [{}, {}, {"b": [torch.ones(2), 1]}]}
    dcp.save(state, storage_writer=DcpWriter(tmp_path / "c"), no_dist=True)
    found = DcpReader(tmp_path / "c").read_metadata().planner_data
    assert ("a", 2, "b", 0) in found.values()
