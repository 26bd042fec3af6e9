from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as torch_common
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from pure.layout.strategies import any_shapes, profile, spec
from shoal.errors import UsageError
from shoal.layout import Even, ParamSpec
from shoal.layout.buffer import shard_of, shard_views
from shoal.layout.chunk import chunk_with_empty
from shoal.layout.even import EvenPacking


@contextmanager
def rank_of_world(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@profile(100)
@given(shape=any_shapes.filter(bool), world_size=st.integers(1, 9), data=st.data())
def test_local_tensors_are_torch_chunks(
    shape: tuple[int, ...], world_size: int, data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int64).view(shape)
    packing = Even(dim - data.draw(st.sampled_from([0, len(shape)]))).pack(
        [ParamSpec.of("w", tensor)], world_size
    )
    for rank, chunk in enumerate(chunk_with_empty(tensor, world_size, dim)):
        (view,) = shard_views(packing, rank, shard_of(packing, rank, [tensor]))
        if tensor.numel() > 0:
            assert view.shape == torch_common._get_dim_chunked_size(chunk, tensor.size(), dim)
        assert view.reshape(-1).tolist() == chunk.reshape(-1).tolist()


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_local_tensors_are_those_of_a_dtensor(world_size: int) -> None:
    shapes = [(5, 3), (4, 4), (1, 7), (2, 3, 5), (3,), (0, 3), (2, 0)]
    tensors = [torch.randn(shape) for shape in shapes]
    for rank in range(world_size):
        with rank_of_world(rank, world_size):
            mesh = init_device_mesh("cpu", (world_size,))
            for tensor in tensors:
                for dim in range(tensor.ndim):
                    distributed = distribute_tensor(tensor, mesh, [Shard(dim)], src_data_rank=None)
                    packing = Even(dim).pack([ParamSpec.of("w", tensor)], world_size)
                    (view,) = shard_views(packing, rank, shard_of(packing, rank, [tensor]))
                    assert view.shape == distributed.to_local().shape
                    assert torch.equal(view, distributed.to_local())


def test_every_parameter_has_one_offset_on_all_ranks() -> None:
    packing = Even((0, 1, 0)).pack([spec("a", 5, 4), spec("b", 3, 7), spec("c", 2)], 4)
    for index in range(3):
        offsets = {packing.piece(index, rank).offset_bytes for rank in range(4)}
        assert len(offsets) == 1


def test_padding_is_less_than_a_slab_for_each_parameter_and_rank() -> None:
    params = [spec("a", 5, 4), spec("b", 3, 7), spec("c", 2)]
    packing = Even().pack(params, 4)
    # Two rows of a, a row of b, one of c; each rounded up to 16 elements.
    assert packing.shard_bytes == 4 * (16 + 16 + 16)


def test_a_single_parameter_that_divides_needs_no_copy() -> None:
    assert Even().pack([spec("w", 8, 16)], 4).gathered_offset(0) == 0
    assert Even().pack([spec("w", 7, 16)], 4).gathered_offset(0) == 0
    assert Even(1).pack([spec("w", 8, 16)], 4).gathered_offset(0) is None
    assert Even(1).pack([spec("w", 1, 64)], 4).gathered_offset(0) == 0


def test_a_scalar_lies_on_rank_0() -> None:
    packing = Even().pack([spec("w", 3), spec("s")], 3)
    assert [packing.piece(1, rank).numel for rank in range(3)] == [1, 0, 0]
    assert packing.piece(1, 0).shape == ()
    assert packing.is_zero_copy(1)


def test_dims_must_be_dims_and_one_per_parameter() -> None:
    for call in (
        lambda: Even(1).pack([spec("w", 3)], 2),
        lambda: Even(-2).pack([spec("w", 3)], 2),
        lambda: Even((0,)).pack([spec("a", 3), spec("b", 3)], 2),
        lambda: Even("0"),  # pyright: ignore[reportArgumentType]
        lambda: Even([0]),  # pyright: ignore[reportArgumentType]
        lambda: Even((0, True)),
    ):
        with pytest.raises(UsageError):
            call()


@pytest.mark.parametrize(
    "change",
    [
        {"shard_bytes": 100},
        {"shard_bytes": 64},
        {"shard_bytes": -64},
        {"world_size": 0},
        {"dims": (0,)},
        {"dims": (0, 1)},
        {"offsets_bytes": (0,)},
        {"offsets_bytes": (0, 0)},
        {"offsets_bytes": (0, 68)},
        {"offsets_bytes": (-64, 64)},
    ],
)
def test_a_wrong_packing_cannot_be_built(change: dict) -> None:
    right = {
        "params": (spec("a", 4, 4), spec("b", 4)),
        "world_size": 2,
        "shard_bytes": 128,
        "dims": (0, 0),
        "offsets_bytes": (0, 64),
    }
    assert EvenPacking(**right) == Even().pack(right["params"], 2)
    with pytest.raises(UsageError):
        EvenPacking(**{**right, **change})
