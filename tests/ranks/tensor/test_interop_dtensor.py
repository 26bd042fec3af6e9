"""Sharded tensors and DTensors: each becomes the other, with the same elements on every rank."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from cuts import sharded
from harness import ranks
from shoal.errors import MeshError, UsageError
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole
from shoal.sharded_tensor import Shard as ListedShard
from shoal.sharded_tensor import init_from_local_shards, rand
from shoal.sharding_spec import ChunkShardingSpec
from shoal.tensor import ShardedTensor

SHAPES = [(8, 6), (7, 5), (3, 10), (1, 4), (5,), (2, 3, 9), (0, 4)]
LAYOUTS: list[Layout] = [Even(), Flat(), Rows(), Block(5), Whole()]


def whole(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def one_axis(shape: tuple[int, ...]) -> list[list[Placement]]:
    return [[Replicate()], *([Shard(dim)] for dim in range(-1, len(shape)))]


def two_axes(shape: tuple[int, ...]) -> list[list[Placement]]:
    choices: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    return [[a, b] for a in choices for b in choices]


def meshes() -> list[tuple[DeviceMesh, bool]]:
    size = dist.get_world_size()
    found = [(init_device_mesh("cpu", (size,)), False)]
    return found + ([(init_device_mesh("cpu", (2, 2)), True)] if size == 4 else [])


def check_same(found: DTensor, expected: DTensor) -> None:
    assert (found.shape, found.stride(), found.dtype) == (
        expected.shape,
        expected.stride(),
        expected.dtype,
    )
    assert found.placements == expected.placements
    assert found.device_mesh == expected.device_mesh
    assert torch.equal(found.to_local(), expected.to_local())


@ranks(2, 4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_there_and_back(shape: tuple[int, ...]) -> None:
    values = whole(shape)
    for mesh, is_2d in meshes():
        for placements in two_axes(shape) if is_2d else one_axis(shape):
            dtensor = distribute_tensor(values, mesh, placements)
            tensor = ShardedTensor.from_dtensor(dtensor)
            assert type(tensor) is ShardedTensor
            assert (tensor.shape, tensor.dtype) == (dtensor.shape, dtensor.dtype)
            assert torch.equal(tensor.full_tensor(), values), placements
            if tensor.local.numel():
                assert tensor.local.data_ptr() == dtensor.to_local().data_ptr(), placements
            check_same(tensor.to_dtensor(mesh, placements), dtensor)


@ranks(2, 4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_every_layout_becomes_any_dtensor(layout: Layout) -> None:
    values = [whole(shape, seed) for seed, shape in enumerate(SHAPES)]
    for mesh, is_2d in meshes():
        for tensor, value in zip(sharded(values, layout), values, strict=True):
            shape = tuple(value.shape)
            for placements in two_axes(shape) if is_2d else one_axis(shape):
                found = tensor.to_dtensor(mesh, placements)
                check_same(found, distribute_tensor(value, mesh, placements))


@ranks(4)
def test_several_shards_on_a_rank_become_one() -> None:
    values, rank = whole((8, 3)), dist.get_rank()
    rows = [rank, 7 - rank]
    shards = [
        ListedShard.from_tensor_and_offsets(values[[row]].clone(), [row, 0], rank) for row in rows
    ]
    tensor = init_from_local_shards(shards, 8, 3)
    mesh = init_device_mesh("cpu", (4,))
    check_same(tensor.to_dtensor(mesh, [Shard(0)]), distribute_tensor(values, mesh, [Shard(0)]))


@ranks(2)
def test_an_equal_cut_shares_memory() -> None:
    mesh = init_device_mesh("cpu", (2,))
    spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    (packed,) = sharded([whole((8, 4))], Rows())
    for tensor in (rand(spec, 5, 4), packed):
        dtensor = tensor.to_dtensor(mesh, [Shard(0)])
        assert dtensor.to_local().data_ptr() == tensor.local.data_ptr()
        tensor.local.fill_(3.0)
        assert torch.equal(dtensor.to_local(), tensor.local.view(dtensor.to_local().shape))


@ranks(2)
def test_a_local_tensor_that_is_not_contiguous_is_copied() -> None:
    mesh = init_device_mesh("cpu", (2,))
    values = whole((4, 6))
    local = values[dist.get_rank() * 2 :][:2].t().contiguous().t()
    dtensor = DTensor.from_local(local, mesh, [Shard(0)])
    assert torch.equal(ShardedTensor.from_dtensor(dtensor).full_tensor(), values)


@ranks(4)
def test_replicas_know_their_number() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    values = whole((6, 4))
    for placements, axis in (([Replicate(), Shard(0)], 0), ([Shard(1), Replicate()], 1)):
        tensor = ShardedTensor.from_dtensor(distribute_tensor(values, mesh, placements))
        assert tensor.placement.replica == mesh.get_local_rank(axis)
        assert tensor.placement.group.size() == 2
    group = dist.group.WORLD
    tensor = ShardedTensor.from_dtensor(
        distribute_tensor(values, mesh, [Replicate(), Shard(0)]), group
    )
    assert tensor.placement.replica == 0
    assert tensor.local.numel() == (12 if dist.get_rank() < 2 else 0)
    assert torch.equal(tensor.full_tensor(), values)


@ranks(4)
def test_part_of_the_world() -> None:
    group = dist.new_group([1, 3])
    mesh = DeviceMesh("cpu", [1, 3])
    if dist.get_rank() not in (1, 3):
        return
    values = whole((5, 3))
    dtensor = distribute_tensor(values, mesh, [Shard(0)])
    for tensor in (
        ShardedTensor.from_dtensor(dtensor),
        ShardedTensor.from_dtensor(dtensor, group),
    ):
        assert torch.equal(tensor.full_tensor(), values)
        check_same(tensor.to_dtensor(mesh, [Shard(0)]), dtensor)


@ranks(2, 4)
@pytest.mark.parametrize("shape", [(7, 5), (1, 4)], ids=str)
def test_gradients_go_through(shape: tuple[int, ...]) -> None:
    weights = whole(shape, 1)
    for mesh, is_2d in meshes():
        for placements in two_axes(shape) if is_2d else one_axis(shape):
            leaf = distribute_tensor(whole(shape), mesh, placements).requires_grad_()
            tensor = ShardedTensor.from_dtensor(leaf * 2)
            (factors,) = sharded([weights], Flat())
            if is_2d and tensor.placement.group.size() < 4:
                (tensor * tensor.detach()).to_dtensor(mesh, placements).sum().backward()
                expected = 4 * whole(shape)
            else:
                back = tensor.to_dtensor(mesh, placements)
                (back * factors.to_dtensor(mesh, placements)).sum().backward()
                expected = 2 * weights
            assert leaf.grad is not None
            torch.testing.assert_close(leaf.grad.full_tensor(), expected)


@ranks(2, 4)
@pytest.mark.parametrize("layout", [Flat(), Whole()], ids=repr)
def test_a_leaf_gets_a_gradient_cut_like_itself(layout: Layout) -> None:
    shape = (7, 5)
    for mesh, is_2d in meshes():
        for placements in two_axes(shape) if is_2d else one_axis(shape):
            (leaf,) = sharded([whole(shape)], layout)
            leaf.requires_grad_()
            leaf.to_dtensor(mesh, placements).square().sum().backward()
            assert isinstance(leaf.grad, ShardedTensor)
            assert leaf.grad.placement.agrees(leaf.placement)
            torch.testing.assert_close(leaf.grad.full_tensor(), 2 * whole(shape))


@ranks(4)
def test_what_cannot_be_converted_says_so() -> None:
    mesh = init_device_mesh("cpu", (4,))
    partial = DTensor.from_local(torch.zeros(4), mesh, [Partial()])
    with pytest.raises(NotImplementedError, match="Partial"):
        ShardedTensor.from_dtensor(partial)
    with pytest.raises(UsageError, match="expected a DTensor, got a Tensor"):
        ShardedTensor.from_dtensor(torch.zeros(2))  # pyright: ignore
    (tensor,) = sharded([whole((4, 4))], Flat())
    with pytest.raises(NotImplementedError, match="Partial"):
        tensor.to_dtensor(mesh, [Partial()])
    with pytest.raises(UsageError, match="one placement for each of 1 axes"):
        tensor.to_dtensor(mesh, [Shard(0), Shard(1)])
    pairs = init_device_mesh("cpu", (2, 2))
    with pytest.raises(MeshError, match="have 8 of the 16 elements"):
        ShardedTensor.from_dtensor(
            distribute_tensor(whole((4, 4)), pairs, [Shard(0), Shard(1)]), pairs.get_group(0)
        )
    with pytest.raises(MeshError, match=r"mesh's ranks \[0, 1\], got ranks \[0, 1, 2, 3\]"):
        tensor.to_dtensor(DeviceMesh("cpu", [0, 1]), [Shard(0)])
