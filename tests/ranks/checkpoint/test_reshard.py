"""Checkpoints of sharded tensors: saved by some ranks, loaded by others, wrong on one of them."""

import resource
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

from harness import on_ranks, ranks
from shoal import fully_shard
from shoal.checkpoint import data_files, load, load_training, read_manifest, save, save_training
from shoal.errors import CheckpointError, UsageError

CASES: dict[str, tuple[tuple[int, ...], torch.dtype, Placement]] = {
    "even": ((8, 3), torch.float32, Shard(0)),
    "uneven": ((7, 5), torch.float32, Shard(0)),
    "some ranks empty": ((1, 6), torch.bfloat16, Shard(0)),
    "5 rows": ((5,), torch.bfloat16, Shard(0)),
    "columns": ((3, 10, 2), torch.float64, Shard(1)),
    "last dim": ((2, 3), torch.int64, Shard(-1)),
    "replicated": ((4, 4), torch.float32, Replicate()),
    "nothing": ((0, 4), torch.float32, Shard(0)),
}


def whole(name: str) -> torch.Tensor:
    """The same values on every rank and in every process."""
    shape, dtype, _ = CASES[name]
    seed = list(CASES).index(name)
    values = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return (values * 1000).to(dtype)


def sharded(*, filled: bool) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors: dict[str, torch.Tensor] = {}
    for name, (_, _, placement) in CASES.items():
        values = whole(name) if filled else torch.zeros_like(whole(name))
        tensors[name] = distribute_tensor(values, mesh, [placement])
    tensors["plain"] = torch.arange(4.0) if filled else torch.zeros(4)
    return tensors


def group_of_this_rank() -> dist.ProcessGroup:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return cast(dist.ProcessGroup, groups[dist.get_rank()])


def blank() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(whole(name)) for name in CASES} | {"plain": torch.zeros(4)}


def assert_filled(tensors: dict[str, torch.Tensor]) -> None:
    for name in CASES:
        value = tensors[name]
        found = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(found, whole(name)), name
    assert torch.equal(tensors["plain"], torch.arange(4.0))


def save_some(folder: Path) -> None:
    # Small blocks, so that a shard is several regions, which others cut elsewhere.
    data_files.REGION_BYTES, usual = 24, data_files.REGION_BYTES
    try:
        save(folder, sharded(filled=True), {"rank": dist.get_rank()})
    finally:
        data_files.REGION_BYTES = usual


def load_some(folder: Path) -> None:
    tensors = sharded(filled=False)
    assert load(folder, tensors) == {"rank": 0}
    assert_filled(tensors)


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (4, 4), (2, 1), (1, 2)])
def test_loads_on_any_number_of_ranks(tmp_path: Path, before: int, after: int) -> None:
    folder = tmp_path / "c"
    on_ranks(before, save_some, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    on_ranks(after, load_some, folder)
    plain = blank()
    load(folder, plain)
    assert_filled(plain)


def test_every_element_is_stored_once_in_the_file_of_a_rank_that_holds_it(tmp_path: Path) -> None:
    on_ranks(4, save_some, tmp_path / "c")
    manifest = read_manifest(tmp_path / "c")
    assert manifest.world_size == 4
    files = {name: {s.file for s in entry.regions} for name, entry in manifest.tensors.items()}
    first, second, third, fourth = (f"rank-{rank:05d}.safetensors" for rank in range(4))
    assert files["even"] == {first, second, third, fourth}
    assert files["5 rows"] == {first, second, third}
    assert files["some ranks empty"] == {first}
    assert files["replicated"] == files["plain"] == {first}
    assert files["nothing"] == set()


def test_a_plain_checkpoint_loads_sharded(tmp_path: Path) -> None:
    values = {name: whole(name) for name in CASES} | {"plain": torch.arange(4.0)}
    save(tmp_path / "c", values, {"rank": 0})
    on_ranks(4, load_some, tmp_path / "c")


@ranks(4)
def test_two_mesh_axes(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    values = torch.arange(35.0).reshape(7, 5)
    placements = {"hybrid": [Replicate(), Shard(0)], "both": [Shard(0), Shard(0)]}
    placements |= {"tiles": [Shard(1), Shard(0)]}
    save(
        tmp_path / "c",
        {name: distribute_tensor(values, mesh, p) for name, p in placements.items()},
        {},
    )
    turned = {name: p[::-1] for name, p in placements.items()}
    blank = {
        name: distribute_tensor(torch.zeros_like(values), mesh, p) for name, p in turned.items()
    }
    load(tmp_path / "c", blank)
    for value in blank.values():
        assert torch.equal(value.full_tensor(), values)


@ranks(4)
def test_a_group_of_some_ranks_saves_alone(tmp_path: Path) -> None:
    group = cast(dist.ProcessGroup, dist.new_group([1, 3]))
    values = torch.full((3,), float(dist.get_rank()))
    if dist.get_rank() in (1, 3):
        save(tmp_path / "c", {"x": values}, {"rank": dist.get_rank()}, group=group)
        assert load(tmp_path / "c", {"x": values}, group=group) == {"rank": 1}
        assert values.tolist() == [1.0, 1.0, 1.0]
    else:
        with pytest.raises(UsageError, match="not in the group"):
            save(tmp_path / "c", {"x": values}, {}, group=group)


@ranks(2)
def test_damage_that_one_rank_sees_is_an_error_on_all_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "c"
    save(folder, sharded(filled=True), {})
    if dist.get_rank() == 0:
        path = folder / "rank-00001.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    dist.barrier()
    tensors = sharded(filled=False)
    with pytest.raises(CheckpointError) as raised:
        load(folder, tensors, verify_first=True)
    messages: list[str | None] = [None, None]
    dist.all_gather_object(messages, str(raised.value))
    assert messages[0] == messages[1]
    assert str(raised.value).startswith("rank 1: ")
    assert "rank-00001.safetensors: tensor " in str(raised.value)
    for tensor in tensors.values():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert not local.any()


@ranks(2)
def test_a_tensor_that_one_rank_cannot_save_is_an_error_on_all(tmp_path: Path) -> None:
    bad = dist.get_rank() == 1
    tensors = {"x": torch.zeros(2, device="meta" if bad else "cpu")}
    expected = NotImplementedError if bad else CheckpointError
    with pytest.raises(expected, match="'x': checkpoints of meta tensors"):
        save(tmp_path / "c", tensors, {})
    assert list(tmp_path.iterdir()) == []


@ranks(2)
def test_a_file_that_one_rank_cannot_write_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.zeros(20_000), mesh, [Shard(0)])
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(
            CheckpointError,
            match=r"^rank 1: cannot write .*rank-00001\.safetensors: File too large",
        ):
            save(tmp_path / "c", {"x": tensor}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    dist.barrier()
    assert list(tmp_path.iterdir()) == []
    save(tmp_path / "c", {"x": tensor}, {})


@ranks(2)
def test_ranks_that_save_different_things_all_say_so(tmp_path: Path) -> None:
    rank = dist.get_rank()
    with pytest.raises(CheckpointError, match=r"rank 1 has 'only on 1' of shape \(2,\)"):
        save(
            tmp_path / "c",
            {"x": torch.zeros(1)} | ({"only on 1": torch.zeros(2)} if rank else {}),
            {},
        )
    with pytest.raises(CheckpointError, match="rank 0 saves to 'step-0', rank 1 to 'step-1'"):
        save(tmp_path / f"step-{rank}", {"x": torch.zeros(1)}, {})
    assert list(tmp_path.iterdir()) == []


@ranks(2)
def test_a_tensor_whose_mesh_is_larger_than_the_group_is_refused(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
    alone = group_of_this_rank()
    folder = tmp_path / f"c{dist.get_rank()}"
    with pytest.raises(CheckpointError, match=r"hold 2 elements, .* All ranks of the tensor's"):
        save(folder, {"x": tensor}, {}, group=alone)
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


@ranks(2)
def test_placements_that_are_not_supported_are_named(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.zeros(2), mesh, [Partial()])
    with pytest.raises(NotImplementedError, match="'x': checkpoints of the placement Partial"):
        save(tmp_path / "c", {"x": partial}, {})


@ranks(2)
def test_ranks_that_see_different_checkpoints_all_say_so(tmp_path: Path) -> None:
    folder = tmp_path / str(dist.get_rank())
    alone = group_of_this_rank()
    tensors = {"x": torch.full((2,), float(dist.get_rank()))}
    save(folder, tensors, {}, group=alone)
    with pytest.raises(CheckpointError, match="the ranks read different checkpoints"):
        load(folder, tensors)
    missing = folder if dist.get_rank() == 0 else tmp_path / "missing"
    with pytest.raises(CheckpointError, match=r"^rank 1: there is no checkpoint"):
        load(missing, tensors)


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
        loss = model(torch.randn(4, 5, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = []
    for parameter in model.parameters():
        tensors += [parameter, *optimizer.state[parameter].values()]
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return [tensor.detach().clone() for tensor in whole]


def train_and_save(folder: Path) -> list[torch.Tensor]:
    model = build(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(3))
    save_training(folder, model, optimizer, {"step": 3})
    saved = state_of(model, optimizer)
    unbroken = train(model, optimizer, range(3, 6))

    resumed = build(1)
    fresh = torch.optim.AdamW(resumed.parameters(), lr=1.0)
    assert load_training(folder, resumed, fresh) == {"step": 3}
    assert train(resumed, fresh, range(3, 6)) == unbroken
    assert all(map(torch.equal, state_of(resumed, fresh), state_of(model, optimizer)))
    return saved


def load_state(folder: Path) -> list[torch.Tensor]:
    model = build(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    load_training(folder, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    return state_of(model, optimizer)


def test_training_resumes_exactly_and_moves_to_other_world_sizes(tmp_path: Path) -> None:
    saved = on_ranks(2, train_and_save, tmp_path / "c")[0]
    for world_size in (1, 4):
        for found in on_ranks(world_size, load_state, tmp_path / "c"):
            assert all(map(torch.equal, found, saved))
