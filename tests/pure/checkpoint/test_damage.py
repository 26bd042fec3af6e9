"""A thousand kinds of damage, and files that were made to do harm."""

import importlib
import json
import os
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from shoal.checkpoint import (
    load,
    load_model,
    load_training,
    read_manifest,
    save,
    save_training,
)
from shoal.checkpoint.manifest import NAME, sealed
from shoal.comm.local import run_local
from shoal.errors import CheckpointError, ShoalError

LOADING = importlib.import_module("shoal.checkpoint.load")  # not the function
NAMES = ("a", "b", "c")


def sharded(*, filled: bool) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    for seed, name in enumerate(NAMES):
        values = torch.rand(6, 3, generator=torch.Generator().manual_seed(seed))
        values = values + 1 if filled else torch.zeros(6, 3)
        found[name] = distribute_tensor(values, mesh, [Shard(0)])
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def damage(folder: Path, choose: random.Random) -> Callable[[], None]:
    """Harm one file of a checkpoint; return what mends it."""
    path = choose.choice(sorted(folder.iterdir()))
    data = path.read_bytes()
    kind = choose.choice(["flip", "flip", "flip", "truncate", "grow", "delete", "empty"])
    if kind == "delete":
        path.unlink()
    elif kind == "flip":
        harmed = bytearray(data)
        harmed[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        path.write_bytes(harmed)
    else:
        size = {"truncate": choose.randrange(len(data)), "empty": 0, "grow": len(data)}[kind]
        path.write_bytes(data[:size] + (b"\0" if kind == "grow" else b""))
    return lambda: path.write_bytes(data) and None


@pytest.mark.parametrize(
    "count", [100, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(600)])]
)
def test_damages_are_each_found_by_all_ranks(tmp_path: Path, count: int) -> None:
    folder = tmp_path / "c"
    choose = random.Random(11)
    mend: list[Callable[[], None]] = []

    def body() -> None:
        save(folder, sharded(filled=True), {})
        targets = sharded(filled=False)
        for index in range(count):
            if dist.get_rank() == 0:
                mend.append(damage(folder, choose))
            dist.barrier()
            with pytest.raises(CheckpointError) as raised:
                load(folder, targets, verify_first=bool(index % 2))
            messages: list[Any] = [None, None]
            dist.all_gather_object(messages, str(raised.value))
            assert messages[0] == messages[1]
            text = messages[0]
            assert NAME in text or "complete checkpoint" in text or ": tensor '" in text, text
            assert not any(local(tensor).any() for tensor in targets.values())
            if dist.get_rank() == 0:
                mend.pop()()
        dist.barrier()
        load(folder, targets)
        for name, tensor in sharded(filled=True).items():
            assert torch.equal(local(targets[name]), local(tensor))

    run_local(2, body, timeout_s=590.0)


def test_tensors_before_the_damaged_one_are_written_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOADING, "STAGED_BYTES", 1)
    folder = tmp_path / "c"

    def body() -> None:
        save(folder, sharded(filled=True), {})
        if dist.get_rank() == 0:
            stored = read_manifest(folder).tensors["b"].regions[-1]
            path = folder / stored.file
            data = bytearray(path.read_bytes())
            data[stored.start] ^= 1
            path.write_bytes(data)
        dist.barrier()
        targets = sharded(filled=False)
        begun: list[int] = []
        with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors: tensor 'b'"):
            load(folder, targets, before_write=lambda: begun.append(1))
        assert begun == [1]
        assert local(targets["a"]).all()
        assert not local(targets["b"]).any()
        assert not local(targets["c"]).any()

    run_local(2, body)


def harmed_training(folder: Path) -> nn.Module:
    """Save a model, then flip a bit of the last tensor of its checkpoint; give another model."""
    model = nn.Linear(3000, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
    model(torch.ones(1, 3000)).sum().backward()
    optimizer.step()
    save_training(folder, model, optimizer, {})
    stored = read_manifest(folder).tensors["model/weight"].regions[0]
    data = bytearray((folder / stored.file).read_bytes())
    data[stored.start] ^= 1
    (folder / stored.file).write_bytes(data)
    return nn.Linear(3000, 2)


def test_a_mixture_cannot_be_used_until_a_load_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOADING, "STAGED_BYTES", 1)
    model = harmed_training(tmp_path / "bad")
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
    save_training(tmp_path / "good", model, optimizer, {})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="tensor 'model/weight'"):
        load_training(tmp_path / "bad", model, optimizer, verify_first=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model(torch.ones(1, 3000))
    with pytest.raises(CheckpointError, match="tensor 'model/weight'"):
        load_training(tmp_path / "bad", model, optimizer)
    with pytest.raises(CheckpointError, match="mixture of two states: load a good checkpoint"):
        model(torch.ones(1, 3000))
    with pytest.raises(CheckpointError, match="mixture"):
        save_training(tmp_path / "mixed", model, optimizer, {})
    load_training(tmp_path / "good", model, optimizer)
    model(torch.ones(1, 3000))
    with pytest.raises(CheckpointError):
        load_model(tmp_path / "bad", model)
    load_model(tmp_path / "good", model, verify_first=True)
    assert torch.equal(model.weight, before["weight"])


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest as someone would who also mends its checksum."""
    content = json.loads((folder / NAME).read_bytes())
    content.pop("checksum")
    change(content)
    (folder / NAME).write_bytes(sealed(content))


def first(content: dict[str, Any]) -> dict[str, Any]:
    return content["tensors"]["x"]["regions"][0]


PATHS = ("../x.safetensors", "/etc/passwd", "..", ".", "", "a/b", "rank-00000.safetensors/..", "~")
NUMBERS = (-1, 2**31, 2**63, 2**64, 10**30, 1.5, True, None, "1", [1], {}, -(10**40))
HOSTILE: list[Callable[[dict[str, Any]], object]] = [
    *(lambda c, p=p: first(c).update(file=p) for p in PATHS),
    *(lambda c, p=p: c.update(files={p: c["files"].popitem()[1]}) for p in PATHS),
    *(lambda c, n=n: first(c).update(start=n) for n in NUMBERS),
    *(lambda c, n=n: first(c).update(offsets=[n, 0]) for n in NUMBERS),
    *(lambda c, n=n: first(c).update(sizes=[n, 3]) for n in NUMBERS),
    *(lambda c, n=n: c["tensors"]["x"].update(shape=[n, 3]) for n in NUMBERS),
    *(lambda c, n=n: c.update(world_size=n) for n in NUMBERS if n not in (2**31, 2**63, 2**64)),
    *(
        lambda c, n=n, k=k: next(iter(c["files"].values())).update({k: n})
        for n in NUMBERS
        for k in ("bytes", "header_bytes", "header_crc32")
    ),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "c", {"x": torch.ones(4, 3)}, {})
    return tmp_path / "c"


def test_hostile_manifests_are_refused_in_bounded_memory(folder: Path) -> None:
    """At least a hundred of them; each with a checksum that is right."""
    good = (folder / NAME).read_bytes()
    refused = 0
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for change in HOSTILE:
        (folder / NAME).write_bytes(good)
        rewritten(folder, change)
        if (folder / NAME).read_bytes() == good:
            continue
        target = torch.zeros(4, 3)
        try:
            load(folder, {"x": target})
        except ShoalError:
            refused += 1
            assert not target.any()
        else:
            assert target.eq(1).all()
    assert refused >= 95
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 100_000


def test_links_pipes_and_holes_instead_of_files(folder: Path, tmp_path: Path) -> None:
    data_file = folder / "rank-00000.safetensors"
    data = data_file.read_bytes()
    for path in (data_file, folder / NAME):
        content = path.read_bytes()
        path.unlink()
        outside = tmp_path / "outside"
        outside.write_bytes(content)
        path.symlink_to(outside)
        with pytest.raises(CheckpointError, match="it is a link, not a regular file"):
            load(folder, {"x": torch.zeros(4, 3)})
        path.unlink()
        path.write_bytes(content)
    data_file.unlink()
    os.mkfifo(data_file)
    with pytest.raises(CheckpointError, match="not a regular file"):
        load(folder, {"x": torch.zeros(4, 3)})
    data_file.unlink()
    with data_file.open("wb") as file:
        file.write(data)
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=r"has 1,099,511,627,776 bytes"):
        load(folder, {"x": torch.zeros(4, 3)})


def test_regions_that_overlap_leave_no_element_unfilled(tmp_path: Path) -> None:
    def body() -> None:
        mesh = init_device_mesh("cpu", (2,))
        save(tmp_path / "c", {"x": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}, {})

    run_local(2, body)
    rewritten(
        tmp_path / "c",
        lambda c: c["tensors"]["x"]["regions"][1].update(offsets=[1]),
    )
    with pytest.raises(CheckpointError, match=r"hold some twice"):
        load(tmp_path / "c", {"x": torch.zeros(4)})
