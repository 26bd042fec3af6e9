"""Checkpoints of sharded tensors: any layout on any number of ranks loads into any other."""

from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from cuts import LAYOUTS, SHAPES, parameters, random_tensors, sharded
from harness import on_ranks, ranks
from shoal.checkpoint import data_files, load, load_training, save, save_training
from shoal.errors import CheckpointError
from shoal.layout import Block, Even, Flat, Layout, ParamSpec, Rows, Whole
from shoal.tensor import Packed, ShardedTensor

NAMES = [f"p{index}" for index in range(len(SHAPES))]


def tensors_of(layout: Layout | None, *, filled: bool) -> dict[str, torch.Tensor]:
    """Values that all ranks share, or zeros, cut by a layout of ours or into DTensors."""
    values = [tensor if filled else torch.zeros_like(tensor) for tensor in random_tensors()]
    if layout is not None:
        return dict(zip(NAMES, sharded(values, layout), strict=True))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(value, mesh, [Shard(0)]) if value.dim() else value
        for name, value in zip(NAMES, values, strict=True)
    }


def save_cut(folder: Path, layout: Layout | None) -> None:
    # Small blocks, so that regions are stored in several pieces, which others cut elsewhere.
    data_files.REGION_BYTES, usual = 96, data_files.REGION_BYTES
    try:
        save(folder, tensors_of(layout, filled=True), {})
    finally:
        data_files.REGION_BYTES = usual


def load_cut(folder: Path) -> None:
    for layout in (*LAYOUTS, None):
        tensors = tensors_of(layout, filled=False)
        load(folder, tensors)
        for tensor, expected in zip(tensors.values(), random_tensors(), strict=True):
            full = getattr(tensor, "full_tensor", lambda t=tensor: t)()
            assert torch.equal(full, expected), layout


@pytest.mark.parametrize(
    ("layout", "before", "after"),
    [
        (Flat(), 2, 4),
        (Flat(), 4, 1),
        (Rows(), 4, 2),
        (Block(5), 2, 2),
        (Whole(), 4, 2),
        (Even(), 1, 4),
        (None, 4, 2),
    ],
    ids=str,
)
def test_any_cut_loads_into_any_other(
    tmp_path: Path, layout: Layout | None, before: int, after: int
) -> None:
    on_ranks(before, save_cut, tmp_path / "c", layout)
    on_ranks(after, load_cut, tmp_path / "c")
    plain = {name: torch.zeros(shape) for name, shape in zip(NAMES, SHAPES, strict=True)}
    load(tmp_path / "c", plain)
    assert all(map(torch.equal, plain.values(), random_tensors()))


class Layer(nn.Module):
    def __init__(self, layout: Layout, seed: int) -> None:
        super().__init__()
        values = random_tensors([(9, 5), (3,), (40, 2)], seed)
        self.weight, self.bias, self.table = parameters(values, layout)

    def full(self) -> list[torch.Tensor]:
        return [cast(ShardedTensor, p).full_tensor() for p in self.parameters()]


def train(layer: Layer, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        gradients = random_tensors([tuple(p.shape) for p in layer.parameters()], seed)
        for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(gradient)
        optimizer.step()


def train_and_save(folder: Path) -> list[torch.Tensor]:
    layer = Layer(Flat(), 0)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, foreach=True)
    train(layer, optimizer, range(10, 13))
    save_training(folder, layer, optimizer, {"step": 3})
    train(layer, optimizer, range(13, 16))
    return layer.full()


def resume(folder: Path, layout: Layout) -> list[torch.Tensor]:
    layer = Layer(layout, 1)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1.0, foreach=True)
    assert load_training(folder, layer, optimizer) == {"step": 3}
    train(layer, optimizer, range(13, 16))
    return layer.full()


def test_training_goes_on_exactly_in_another_layout_and_world(tmp_path: Path) -> None:
    unbroken = on_ranks(2, train_and_save, tmp_path / "c")[0]
    for world_size, layout in ((4, Rows()), (1, Flat()), (2, Whole()), (4, Flat())):
        for found in on_ranks(world_size, resume, tmp_path / "c", layout):
            assert all(map(torch.equal, found, unbroken))


@ranks(4)
def test_of_equal_replicas_one_writes(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    group, replica = mesh.get_group("shard"), mesh.get_local_rank("replicate")
    values = torch.arange(40.0)
    packing = Flat().pack([ParamSpec.of("x", values)], 2)
    placements = [
        Packed(packing=packing, index=0, group=group, rank=group.rank(), replica=number)
        for number in (replica, 0)
    ]
    tensors = [ShardedTensor.of(torch.zeros(p.piece.shape), p) for p in placements]
    for tensor in tensors:
        tensor.copy_(values)
    save(tmp_path / "c", {"x": tensors[0]}, {})
    tensors[0].zero_()
    load(tmp_path / "c", {"x": tensors[0]})
    assert torch.equal(tensors[0].full_tensor(), values)
    save(tmp_path / "d", {"x": tensors[1]}, {})  # both write, and the same
    load(tmp_path / "d", {"x": tensors[0]})
    assert torch.equal(tensors[0].full_tensor(), values)
    tensors[1].add_(replica)
    with pytest.raises(CheckpointError, match="hold 80 elements"):
        save(tmp_path / "e", {"x": tensors[1]}, {})


@ranks(2)
def test_state_that_is_not_placed_like_its_parameter_is_refused(tmp_path: Path) -> None:
    layer = Layer(Flat(), 0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.state[layer.weight]["own"] = torch.zeros(4)
    with pytest.raises(NotImplementedError, match="weight/own is a plain tensor"):
        save_training(tmp_path / "c", layer, optimizer, {})
