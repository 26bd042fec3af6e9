"""Checkpoints in any storage: one that is a dict goes through all that a folder does."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from shoal.checkpoint import (
    Checkpoint,
    DcpReader,
    DcpWriter,
    Retention,
    Storage,
    async_save,
    drop_unfinished,
    export_weights,
    import_dcp,
    latest,
    load,
    load_training,
    read_manifest,
    reshard,
    save,
    save_training,
    step_folder,
    verify,
)
from shoal.checkpoint.disk import DiskStorage
from shoal.checkpoint.storage import is_partial, partial_name, taken
from shoal.comm.local import run_local
from shoal.errors import CheckpointError

FILE = "rank-00000.safetensors"


class MemoryFile:
    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def num_bytes(self) -> int:
        return len(self._data)

    def read(self, start: int, num_bytes: int) -> bytes:
        return self._data[start : start + num_bytes]

    def read_into(self, start: int, memory: memoryview) -> int:
        data = self._data[start : start + len(memory)]
        memory[: len(data)] = data
        return len(data)

    def close(self) -> None:
        pass


class MemoryStorage:
    """Everything that another storage needs to be."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.full_for = ""

    def locate(self, name: str, file: str = "") -> str:
        return f"memory:{name}/{file}" if file else f"memory:{name}"

    def names(self, name: str = "") -> list[str]:
        return list(self._of(name) if name else self.files)

    def exists(self, name: str, file: str = "") -> bool:
        return name in self.files and (not file or file in self.files[name])

    def open(self, name: str, file: str) -> MemoryFile:
        if file not in self._of(name):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return MemoryFile(self.files[name][file])

    def create(self, name: str, *, parents: bool) -> str:
        self._check_absent(name)
        partial = partial_name(name)
        self.files[partial] = {}
        return partial

    def write(
        self, name: str, file: str, chunks: Iterable[bytes | memoryview], num_bytes: int
    ) -> None:
        data = b"".join(chunks)
        if file == self.full_for:
            raise OSError(errno.ENOSPC, "the memory is full")
        if file in self._of(name):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        assert len(data) == num_bytes
        self.files[name][file] = data

    def remove(self, name: str, file: str) -> None:
        self._of(name).pop(file, None)

    def publish(self, partial: str, name: str) -> None:
        self._check_absent(name)
        self.files[name] = self.files.pop(partial)

    def discard(self, partial: str) -> None:
        self.files.pop(partial, None)

    def delete(self, name: str) -> None:
        del self.files[name]

    def _of(self, name: str) -> dict[str, bytes]:
        if name not in self.files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return self.files[name]

    def _check_absent(self, name: str) -> None:
        if name in self.files:
            raise taken(self.locate(name))


@pytest.fixture(params=["memory", "disk"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return MemoryStorage() if request.param == "memory" else DiskStorage(tmp_path / "checkpoints")


def sharded(value: float) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.full((7, 3), value)
    return {"w": distribute_tensor(whole, mesh, [Shard(0)]), "p": torch.full((2,), value)}


def save_in_background(place: Checkpoint, tensors: dict[str, torch.Tensor], extra: dict) -> None:
    async_save(place, tensors, extra).wait()


def loaded(checkpoint: Checkpoint | None) -> float:
    """The value of all elements of a checkpoint of `sharded`."""
    found = {"w": torch.zeros(7, 3), "p": torch.zeros(2)}
    load(checkpoint, found)
    [value] = torch.cat([tensor.flatten() for tensor in found.values()]).unique().tolist()
    return value


def some_training() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = model(torch.randn(5, 4)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def test_a_run_saves_keeps_the_last_ones_and_goes_on_where_it_was(storage: Storage) -> None:
    assert latest(storage) is None
    model, optimizer = some_training()
    for number in (1, 2, 3, 4):
        step(model, optimizer)
        save_training(step_folder(storage, number), model, optimizer, {"step": number})
    removed = Retention(last=1, every=2).apply(storage)
    assert removed == [step_folder(storage, number) for number in (1, 3)]
    assert sorted(storage.names()) == ["step-00000002", "step-00000004"]
    expected = step(model, optimizer)

    other, its_optimizer = some_training()
    newest = latest(storage)
    assert newest == step_folder(storage, 4)
    assert load_training(newest, other, its_optimizer) == {"step": 4}
    assert torch.equal(step(other, its_optimizer), expected)
    for value, its_value in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(value, its_value)


@pytest.mark.parametrize("in_background", [False, True])
def test_ranks_save_together_and_another_number_loads(
    storage: Storage, in_background: bool
) -> None:
    def body() -> None:
        for number in (1, 2):
            tensors, place = sharded(float(number)), step_folder(storage, number)
            if in_background:
                pending = async_save(place, tensors, {})
                for tensor in tensors.values():
                    tensor.zero_()
            else:
                save(place, tensors, {})
        if in_background:
            assert pending.wait() == place

    run_local(3, body)
    assert sorted(storage.names()) == ["step-00000001", "step-00000002"]
    assert sorted(storage.names("step-00000002")) == [
        "manifest.json",
        *(f"rank-{rank:05d}.safetensors" for rank in range(3)),
    ]
    assert loaded(step_folder(storage, 1)) == 1.0
    assert loaded(latest(storage)) == 2.0

    def other_ranks() -> None:
        targets = sharded(0.0)
        load(latest(storage), targets)
        for tensor in targets.values():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            assert local.eq(2.0).all()

    run_local(2, other_ranks)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("bad_rank", [0, 2])
def test_a_refusal_on_one_rank_leaves_nothing_and_is_raised_on_all(
    bad_rank: int, in_background: bool
) -> None:
    storage = MemoryStorage()

    def body() -> str:
        save(step_folder(storage, 1), sharded(1.0), {})
        storage.full_for = f"rank-{bad_rank:05d}.safetensors"
        place, tensors = step_folder(storage, 2), sharded(2.0)
        write = save_in_background if in_background else save
        with pytest.raises(CheckpointError) as raised:
            write(place, tensors, {})
        return str(raised.value)

    [message] = set(run_local(3, body))
    assert f"rank-{bad_rank:05d}.safetensors: the memory is full. Free some space" in message
    assert storage.names() == ["step-00000001"]
    assert loaded(latest(storage)) == 1.0


def test_unfinished_ones_are_not_seen_and_can_be_dropped(storage: Storage) -> None:
    save(step_folder(storage, 1), {"x": torch.ones(2)}, {})
    partial = step_folder(storage, 2).create()
    partial.write("manifest.json", [b"{}"], 2)
    assert latest(storage) == step_folder(storage, 1)
    assert [name for name in storage.names() if is_partial(name)] == [partial.name]
    drop_unfinished(storage)
    assert storage.names() == ["step-00000001"]


def test_what_is_damaged_or_absent_is_named_by_its_place() -> None:
    storage = MemoryStorage()
    place = Checkpoint(storage, "c")
    with pytest.raises(CheckpointError, match="there is no checkpoint memory:c"):
        load(place, {})
    save(place, {"x": torch.ones(4)}, {})
    with pytest.raises(CheckpointError, match="memory:c exists already"):
        save(place, {"x": torch.ones(4)}, {})
    start = read_manifest(place).tensors["x"].regions[0].start
    data = bytearray(storage.files["c"][FILE])
    data[start] ^= 1
    for harmed, message in ((bytes(data), "has checksum"), (bytes(data[:-1]), "the file has")):
        storage.files["c"][FILE] = harmed
        target = torch.zeros(4)
        with pytest.raises(CheckpointError, match=rf"memory:c/{FILE}: tensor 'x'.*{message}"):
            load(place, {"x": target})
        assert not target.any()
    del storage.files["c"][FILE]
    with pytest.raises(CheckpointError, match=rf"memory:c/{FILE}: tensor 'x' cannot be read: No"):
        load(place, {"x": target})
    del storage.files["c"]["manifest.json"]
    with pytest.raises(CheckpointError, match="memory:c is not a checkpoint"):
        load(place, {"x": target})


@pytest.mark.filterwarnings("ignore")
def test_other_formats_come_from_a_storage_and_go_to_one(storage: Storage, tmp_path: Path) -> None:
    place = Checkpoint(storage, "by-dcp")
    dcp.save({"model/w": torch.arange(6.0)}, storage_writer=DcpWriter(place), no_dist=True)
    found = {"model/w": torch.zeros(6)}
    dcp.load(found, storage_reader=DcpReader(place), no_dist=True)
    assert torch.equal(found["model/w"], torch.arange(6.0))
    reshard(place, Checkpoint(storage, "cut"), 2)
    assert len(verify(Checkpoint(storage, "cut")).files) == 2
    export_weights(place, Checkpoint(storage, "exported"))
    assert storage.names("exported") == ["model.safetensors"]
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "plain", no_dist=True)
    import_dcp(tmp_path / "plain", Checkpoint(storage, "imported"))
    load(Checkpoint(storage, "imported"), target := {"w": torch.zeros(3)})
    assert target["w"].all()


def test_every_storage_keeps_the_same_promises(storage: Storage) -> None:
    assert storage.names() == []
    assert not storage.exists("c")
    with pytest.raises(FileNotFoundError):
        storage.open("c", FILE)
    partials = [storage.create("c", parents=True) for _ in range(2)]
    assert len(set(partials)) == 2
    assert all(is_partial(name) and storage.exists(name) for name in partials)
    storage.write(partials[0], FILE, [b"abc", memoryview(b"defg")], 7)
    storage.write(partials[0], "note", [], 0)
    with pytest.raises(FileExistsError):
        storage.write(partials[0], FILE, [b"x"], 1)
    storage.remove(partials[0], "note")
    storage.remove(partials[0], "note")
    storage.publish(partials[0], "c")
    assert sorted(storage.names()) == sorted(["c", partials[1]])
    assert storage.names("c") == [FILE]
    assert storage.exists("c", FILE)
    assert not storage.exists("c", "note")
    for refused in (
        lambda: storage.publish(partials[1], "c"),
        lambda: storage.create("c", parents=True),
    ):
        with pytest.raises(CheckpointError, match=r"c exists already"):
            refused()
    file = storage.open("c", FILE)
    memory = bytearray(4)
    assert file.num_bytes == 7
    assert file.read(2, 3) == b"cde"
    assert file.read(5, 9) == b"fg"
    assert file.read_into(1, memoryview(memory)) == 4
    assert bytes(memory) == b"bcde"
    assert file.read_into(7, memoryview(memory)) == 0
    storage.discard(partials[1])
    storage.discard(partials[1])
    storage.delete("c")
    assert file.read(0, 7) == b"abcdefg"
    file.close()
    assert storage.names() == []


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", "."])
def test_no_name_of_a_file_leads_out_of_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "secret").write_text("")
    storage = DiskStorage(tmp_path)
    for refused in (
        lambda: storage.open("c", name),
        lambda: storage.exists("c", name),
        lambda: storage.remove("c", name),
        lambda: storage.write("c", name, [b"x"], 1),
    ):
        with pytest.raises(OSError, match="not the name of a file in a folder"):
            refused()
