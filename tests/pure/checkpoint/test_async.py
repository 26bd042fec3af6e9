"""Saves in the background, of ranks in one process."""

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from shoal.checkpoint import async_save, latest, load, save, step_folder
from shoal.checkpoint.background import collect_notes, leave_note
from shoal.checkpoint.disk import checkpoint_at
from shoal.comm.local import run_local
from shoal.errors import CheckpointError


def sharded(value: float) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.full((7, 3), value)
    return {"w": distribute_tensor(whole, mesh, [Shard(0)]), "p": torch.full((2,), value)}


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_is_saved_is_what_was_there_when_asked(tmp_path: Path, world_size: int) -> None:
    def body() -> None:
        tensors = sharded(1.0)
        for step in (1, 2):
            pending = async_save(step_folder(tmp_path, step), tensors, {"step": step})
            for tensor in tensors.values():
                tensor.add_(1.0)
        assert pending.wait() == step_folder(tmp_path, 2)
        pending.check()
        assert pending.done

    run_local(world_size, body)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    names = {path.name for path in step_folder(tmp_path, 2).iterdir()}
    assert names == {"manifest.json", *(f"rank-{r:05d}.safetensors" for r in range(world_size))}
    for step in (1, 2):
        found = {"w": torch.zeros(7, 3), "p": torch.zeros(2)}
        assert load(step_folder(tmp_path, step), found) == {"step": step}
        assert all(tensor.eq(step).all() for tensor in found.values())


def test_the_buffer_is_used_again(tmp_path: Path) -> None:
    tensors = {"x": torch.arange(1000.0)}
    first = async_save(tmp_path / "a", tensors, {})
    second = async_save(tmp_path / "b", tensors, {})
    second.wait()
    assert first.buffer.data_ptr() == second.buffer.data_ptr()


def test_at_most_one_is_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    real = os.fsync

    def slow(descriptor: int) -> None:
        gate.wait(30)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    first = async_save(tmp_path / "a", {"x": torch.zeros(3)}, {})
    assert not first.done
    threading.Timer(0.2, gate.set).start()
    second = async_save(tmp_path / "b", {"x": torch.zeros(3)}, {})
    assert first.done
    assert (tmp_path / "a").exists()
    second.wait()


@pytest.mark.parametrize("bad_rank", [0, 2])
@pytest.mark.parametrize("caller", ["wait", "async_save", "save"])
def test_a_failure_on_one_rank_is_raised_once_on_all_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad_rank: int, caller: str
) -> None:
    save(step_folder(tmp_path, 1), {"p": torch.ones(2)}, {})
    real = Path.open

    def full(path: Path, *args: object, **options: object) -> object:
        if path.name == f"rank-{bad_rank:05d}.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *args, **options)

    def body() -> str:
        pending = async_save(step_folder(tmp_path, 2), sharded(2.0), {})
        again = {
            "wait": pending.wait,
            "async_save": lambda: async_save(step_folder(tmp_path, 3), sharded(3.0), {}),
            "save": lambda: save(step_folder(tmp_path, 3), sharded(3.0), {}),
        }[caller]
        with pytest.raises(CheckpointError) as raised:
            again()
        pending.wait()
        return str(raised.value)

    monkeypatch.setattr(Path, "open", full)
    messages = run_local(3, body)
    assert len(set(messages)) == 1
    for part in (f"rank-{bad_rank:05d}.safetensors", "bytes are needed", "bytes are free"):
        assert part in messages[0]
    assert latest(tmp_path) == step_folder(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_check_raises_in_a_later_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    pending = async_save(tmp_path / "c", {"x": torch.zeros(3)}, {})
    pending._thread.join()
    with pytest.raises(CheckpointError, match=r"saving .*c: cannot write .*Input/output error"):
        pending.check()
    with pytest.raises(CheckpointError):
        pending.wait()
    pending.check()
    pending.wait()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_saved_is_refused_at_once(tmp_path: Path) -> None:
    save(tmp_path / "c", {}, {})
    with pytest.raises(CheckpointError, match="exists already"):
        async_save(tmp_path / "c", {"x": torch.zeros(3)}, {})
    with pytest.raises(NotImplementedError, match="complex128"):
        async_save(tmp_path / "d", {"x": torch.zeros(3, dtype=torch.complex128)}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_rank_that_died_is_named(tmp_path: Path) -> None:
    partial = checkpoint_at(tmp_path)
    leave_note(partial, 0, None, None)
    with pytest.raises(CheckpointError, match=r"rank 1 did not write its part .* in 0.05 s"):
        collect_notes(partial, 2, 0.05)
