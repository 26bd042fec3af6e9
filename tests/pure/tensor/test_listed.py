"""Tensors of listed shards: any number of them on a rank, in any order, empty ones among them."""

import copy
import math
import pickle
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pure.layout.strategies import profile
from shoal.comm.local import run_local
from shoal.doors.sharded_tensor.creation import ones, rand, zeros
from shoal.errors import UsageError
from shoal.layout import Region
from shoal.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from shoal.tensor import Listed, ShardedTensor
from shoal.tensor.listed import listed as listed_placement
from shoal.tensor.sharded import allocate


@st.composite
def listings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[Region, int]], int]:
    """A shape cut along every dim, each rectangle on some rank; and how many ranks there are."""
    world_size = draw(st.integers(1, 3))
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
    regions = [Region.whole(shape)]
    for dim, size in enumerate(shape):
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        regions = [_cut(region, dim, *pair) for region in regions for pair in _pairs(cuts)]
    owners = st.lists(st.integers(0, world_size - 1), min_size=len(regions), max_size=len(regions))
    listed = [*zip(regions, draw(owners), strict=True)]
    return shape, draw(st.permutations(listed)), world_size


def _pairs(cuts: list[int]) -> list[tuple[int, int]]:
    return [*pairwise(cuts)] or [(0, 0)]


def _cut(region: Region, dim: int, start: int, stop: int) -> Region:
    offsets, sizes = [*region.offsets], [*region.sizes]
    offsets[dim], sizes[dim] = start, stop - start
    return Region(offsets=tuple(offsets), sizes=tuple(sizes))


def spec_of(listed: list[tuple[Region, int]]) -> EnumerableShardingSpec:
    return EnumerableShardingSpec(
        [
            ShardMetadata([*region.offsets], [*region.sizes], f"rank:{rank}/cpu")
            for region, rank in listed
        ]
    )


def assert_is(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Compare every shard with its part of the whole, and the gathered whole."""
    assert isinstance(tensor, ShardedTensor)
    for shard in tensor.local_shards():
        offsets, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        region = Region(offsets=tuple(offsets), sizes=tuple(sizes))
        assert torch.equal(shard.tensor, whole[region.slices])
    for region, part in tensor.parts():
        assert torch.equal(part, whole[region.slices])
    assert torch.equal(tensor.full_tensor(), whole)


@profile(60)
@given(cut=listings())
def test_any_listing_holds_computes_and_gives_back(cut: Any) -> None:
    shape, listed, world_size = cut
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))

    def rank() -> None:
        own = [region for region, owner in listed if owner == dist.get_rank()]
        tensor = zeros(spec_of(listed), shape)
        assert [tuple(shard.tensor.shape) for shard in tensor.local_shards()] == [
            region.sizes for region in own
        ]
        assert tensor.regions == tuple(region for region in own if region.numel)
        tensor.copy_(whole)
        assert_is(tensor, whole)
        assert_is(tensor * 2 + tensor.clone(), whole * 2 + whole)
        assert_is(tensor.detach().mul_(3).sub_(tensor), (whole * 3) - (whole * 3))
        tensor.copy_(whole)
        assert_is(torch.add(tensor, tensor, out=torch.empty_like(tensor)), whole + whole)
        assert_is(torch.full_like(tensor, 2.5), torch.full(shape, 2.5))
        assert_is(tensor.double(), whole.double())
        assert_is(copy.deepcopy(tensor).zero_(), torch.zeros(shape))
        assert_is(pickle.loads(pickle.dumps(tensor)), whole)
        assert torch.equal(tensor, tensor.clone())
        assert math.prod(shape) == 0 or not torch.equal(tensor, tensor + 1)
        for order in (0, 1, 2, 3.5, math.inf) if whole.numel() else (0, 2):
            norm = torch.linalg.vector_norm(tensor, order)
            torch.testing.assert_close(norm, torch.linalg.vector_norm(whole, order))
        torch.testing.assert_close(tensor.sum(), whole.sum())
        if whole.numel():
            assert (tensor.max(), tensor.min()) == (whole.max(), whole.min())
        assert torch.equal((tensor > 0).any(), (whole > 0).any())
        assert torch.equal((tensor > -9).all(), (whole > -9).all())
        out = torch.zeros(shape) if dist.get_rank() == world_size - 1 else None
        tensor.gather(world_size - 1, out)
        assert out is None or torch.equal(out, whole)

    run_local(world_size, rank)


@profile(60)
@given(cut=listings())
def test_who_holds_what(cut: Any) -> None:
    shape, listed, world_size = cut

    def rank() -> None:
        group = dist.group.WORLD
        assert group is not None
        placement = Listed.of_spec(spec_of(listed), shape, group)
        for owner in range(world_size):
            expected = tuple(region for region, who in listed if who == owner and region.numel)
            assert placement.regions_of(owner) == expected
        for region, owner in listed:
            if region.numel:
                assert placement.holders(region) == (owner,)
        again = Listed.of_spec(spec_of([*listed]), shape, group)
        assert placement.agrees(again)
        assert placement == again
        for moved in (
            placement.on(torch.device("meta")),
            listed_placement(group, **pickle.loads(pickle.dumps(placement.without_group()))),
        ):
            assert moved.agrees(placement)
            assert moved.local_shapes == placement.local_shapes

    run_local(world_size, rank)


def test_placements_that_differ_do_not_agree() -> None:
    def rank() -> None:
        group = dist.group.WORLD
        assert group is not None
        places = ["rank:0/cpu", "rank:1/cpu"]

        def chunks(dim: int, *ranks: int) -> Listed:
            spec = ChunkShardingSpec(dim, [places[rank] for rank in ranks])
            return Listed.of_spec(spec, (4, 4), group)

        first = chunks(0, 0, 1)
        assert first.agrees(chunks(-2, 0, 1))
        for other in (chunks(0, 1, 0), chunks(1, 0, 1), chunks(0, 0, 1, 0, 1)):
            assert not first.agrees(other)
        assert not first.agrees(Listed.of_spec(ChunkShardingSpec(0, [*places]), (4, 5), group))
        assert not first.agrees(first.within(dist.new_group()))
        assert first.is_whole is False
        assert chunks(0, 1).is_whole

    run_local(2, rank)


def test_operands_cut_differently_are_refused_whatever_their_number_of_shards() -> None:
    def rank() -> None:
        places = ["rank:0/cpu"]
        several = ones(ChunkShardingSpec(0, places * 3), 6, 2)
        other = ones(ChunkShardingSpec(1, places * 2), 6, 2)
        one = ones(ChunkShardingSpec(0, [*places]), 6, 2)
        for wrong in (other, one):
            with pytest.raises(UsageError, match="cut alike"):
                several + wrong
            with pytest.raises(UsageError, match="cut alike"):
                wrong.add_(several)
        with pytest.raises(NotImplementedError, match="plain tensor of shape"):
            several + torch.ones(6, 2)
        with pytest.raises(AttributeError):
            _ = several.local
        assert torch.equal((several * torch.tensor(2.0)).full_tensor(), torch.full((6, 2), 2.0))

    run_local(1, rank)


def test_shards_are_aliased_and_reach_autograd_each_by_itself() -> None:
    def rank() -> None:
        tensor = rand(ChunkShardingSpec(0, ["rank:0/cpu"] * 2), 4, 3, requires_grad=True)
        first, second = (shard.tensor for shard in tensor.local_shards())
        assert first is tensor.locals[0]
        (first.sum() + 2 * second.sum()).backward()
        assert torch.equal(first.grad, torch.ones(2, 3))
        assert torch.equal(second.grad, torch.full((2, 3), 2.0))
        parameter = nn.Parameter(tensor)
        assert parameter.local_shards()[1].tensor.data_ptr() == second.data_ptr()
        with pytest.raises(RuntimeError, match="requires_grad_"):
            parameter.requires_grad = False

    run_local(1, rank)


def test_a_tensor_takes_the_place_of_another_in_place() -> None:
    def rank() -> None:
        group = dist.group.WORLD
        assert group is not None
        tensor = rand(ChunkShardingSpec(0, ["rank:0/cpu"]), 4, 3)
        spec = ChunkShardingSpec(1, ["rank:0/cpu"] * 3)
        other = allocate(Listed.of_spec(spec, (4, 3), group), torch.float32)
        other.copy_(torch.ones(4, 3))
        tensor.adopt(other)
        assert len(tensor.local_shards()) == 3
        assert torch.equal((tensor + 1).full_tensor(), torch.full((4, 3), 2.0))
        tensor.adopt(ones(ChunkShardingSpec(0, ["rank:0/cpu"]), 4, 3))
        assert tensor.local.shape == (4, 3)

    run_local(1, rank)


def test_local_tensors_that_do_not_fit_a_listing() -> None:
    def rank() -> None:
        group = dist.group.WORLD
        assert group is not None
        spec = ChunkShardingSpec(0, ["rank:0/cpu"] * 2)
        placement = Listed.of_spec(spec, (4,), group)
        with pytest.raises(UsageError, match=r"needs 2 local tensors of shapes .* got \(4,\)"):
            ShardedTensor.of(torch.ones(4), placement)
        with pytest.raises(UsageError, match="got none"):
            ShardedTensor.of([], placement)

    run_local(1, rank)


def empty_handed() -> None:
    """A meta device stands for a GPU: the group's backend would rather have the CPU."""
    spec = ChunkShardingSpec(0, ["rank:1/meta"])
    tensor = zeros(spec, 4, 2)
    assert tensor.device.type == tensor.locals[0].device.type == "meta"
    assert torch.empty_like(tensor).device == (tensor + tensor).device == tensor.device
    mixed = [ShardMetadata([0], [1], "rank:1/meta"), ShardMetadata([1], [1], "rank:1/cpu")]
    placement = Listed.of_spec(EnumerableShardingSpec(mixed), (2,), dist.group.WORLD)
    expected = ("cpu",) if dist.get_rank() == 0 else ("meta", "cpu")
    assert tuple(str(device) for device in placement.local_devices) == expected
    # This process has no such device; to hold nothing needs none.
    elsewhere = Listed.of_spec(ChunkShardingSpec(0, ["rank:1/hpu:0"]), (2,), dist.group.WORLD)
    assert str(elsewhere.local_devices[0]) == ("cpu" if dist.get_rank() == 0 else "hpu:0")


def test_a_rank_without_shards_is_where_the_shards_are() -> None:
    run_local(2, empty_handed)
