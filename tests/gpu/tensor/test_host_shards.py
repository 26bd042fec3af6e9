"""Shards in host memory, over a group whose backend takes the memory of GPUs alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from harness import nccl_ranks
from pure.layout.strategies import spec
from shoal.layout import Even, Flat, Whole
from shoal.sharded_tensor import ones, zeros
from shoal.sharding_spec import ChunkShardingSpec
from shoal.tensor import Listed, Packed
from shoal.tensor.placement import Placement
from shoal.tensor.reshard import reshard
from shoal.tensor.sharded import allocate


def placements(group: dist.ProcessGroup) -> list[Placement]:
    rows = ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"])
    one_rank = ChunkShardingSpec(1, ["rank:1/cpu"])
    packings = [layout.pack([spec("w", 6, 8)], 2) for layout in (Flat(), Even(1), Whole())]
    return [
        Listed.of_spec(rows, (6, 8), group),
        Listed.of_spec(one_rank, (6, 8), group),
        *(Packed(packing=each, index=0, group=group, rank=group.rank()) for each in packings),
    ]


@nccl_ranks(2)
def test_what_communicates_takes_the_way_over_the_gpu() -> None:
    group = dist.new_group(backend="nccl")
    whole = torch.arange(48.0).view(6, 8)
    for placement in placements(group):
        tensor = allocate(placement, torch.float32, torch.device("cpu"))
        tensor.copy_(whole)
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor.full_tensor(), whole)
        for reduce in (torch.sum, torch.max, torch.norm):
            torch.testing.assert_close(reduce(tensor), reduce(whole))
        assert torch.equal(tensor.fetch((slice(1, 3), slice(2, 5))), whole[1:3, 2:5])
        for target in placements(group):
            moved = reshard(tensor, target)
            assert torch.equal(moved.full_tensor(), whole)
            if not (placement.shards_stand_alone and target.shards_stand_alone):
                assert torch.equal(tensor, moved)
                assert not torch.equal(tensor, moved + 1)


@nccl_ranks(2)
@pytest.mark.parametrize("same", [torch.equal, torch.allclose])
def test_comparisons_see_pinned_memory(same: Callable[..., bool]) -> None:
    group = dist.new_group(backend="nccl")
    places = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    tensor = ones(places, 10, 10, process_group=group)
    assert same(tensor, ones(places, 10, 10, process_group=group))
    assert not same(tensor, ones(places, 10, 10, process_group=group, pin_memory=True))
    assert not same(tensor, zeros(places, 10, 10, process_group=group))


@nccl_ranks(4)
def test_a_rank_without_shards_is_where_the_shards_are() -> None:
    """The harness's group serves the CPU too, and so does not say where to be."""
    tensor = ones(ChunkShardingSpec(0, ["rank:1/cuda:0", "rank:0/cuda:0"]), 4, 4)
    assert tensor.device == torch.device("cuda:0")
    assert tensor.locals[0].device == tensor.device
    assert (tensor + tensor).sum().item() == 32


@nccl_ranks(2)
def test_ranks_on_different_types_of_device_meet() -> None:
    tensor = ones(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cuda:0"]), 6, 4)
    assert tensor.device.type == ("cpu" if dist.get_rank() == 0 else "cuda")
    assert tensor.sum().item() == 24
    assert tensor.norm(float("inf")).item() == 1
    assert torch.equal(tensor, tensor.clone())
    assert not torch.equal(tensor, tensor + 1)
    assert torch.equal(tensor.full_tensor().cpu(), torch.ones(6, 4))
