"""Resharding on gloo: bit by bit, against torch's own, and within its memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed._shard import sharded_tensor as theirs
from torch.distributed._shard.sharding_spec import ChunkShardingSpec as TheirSpec

from harness import on_ranks, ranks
from pure.layout.strategies import DTYPES, any_shapes, profile, spec
from pure.tensor.test_gather import fetch_own, regions
from pure.tensor.test_reshard import CORNERS, cross, there_and_back
from pure.tensor.tilings import Chunks, Kind, kinds, placed, sharded
from shoal.layout import Block, Even, Flat, ParamSpec, Region, Rows, Whole
from shoal.tensor import transfer
from shoal.tensor.reshard import reshard
from shoal.tensor.spec import ChunkShardingSpec


@st.composite
def cases(draw: st.DrawFn, num_ranks: int) -> tuple[ParamSpec, Kind, Kind, list[Region | None]]:
    """A tensor, two placements of it, and what each rank fetches."""
    shape = draw(any_shapes)
    param = spec("w", *shape, dtype=draw(st.sampled_from(DTYPES)))
    asked = [draw(regions(shape)) for _ in range(num_ranks)]
    return param, draw(kinds(shape, num_ranks)), draw(kinds(shape, num_ranks)), asked


def try_all(cases: list[tuple[ParamSpec, Kind, Kind, list[Region | None]]]) -> None:
    for param, first, second, asked in cases:
        there_and_back(param, first, second)
        fetch_own(param, first, asked)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@profile(6)
@given(data=st.data())
def test_there_and_back(world_size: int, data: st.DataObject) -> None:
    """Many cases at a time: gloo counts messages, and unequal counts cost new processes."""
    drawn = data.draw(st.lists(cases(world_size), min_size=8, max_size=12))
    on_ranks(world_size, try_all, drawn)


@ranks(4)
def test_a_group_of_some_of_the_ranks() -> None:
    for members, wide in (([1, 3], Flat()), ([2, 0, 3], CORNERS)):
        cross(members, wide)


@ranks(2, 4)
@pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")
@pytest.mark.parametrize("shape", [(8, 12), (4, 8, 12), (4, 4, 8, 4)])
def test_torchs_reshard_gives_the_same(shape: tuple[int, ...], world_size: int) -> None:
    """On sizes that ranks divide: torch's own takes no others on gloo."""
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    orders = [list(range(world_size)), list(reversed(range(world_size)))]
    places = [[f"rank:{rank}/cpu" for rank in order] for order in orders]
    for first, second in itertools.permutations(range(len(shape)), 2):
        for before, after in itertools.product(places, places):
            peer = _theirs(whole, TheirSpec(first, [*before]))
            ours = sharded(whole, Chunks(first, tuple(_ranks(before))))
            peer.reshard(TheirSpec(second, [*after]))
            assert ours.reshard(ChunkShardingSpec(second, [*after])) is ours
            assert torch.equal(ours.local_tensor(), peer.local_tensor())
            (own,) = ours.local_shards()
            (expected,) = peer.local_shards()
            assert own.metadata == expected.metadata
            assert _by_rank(ours.metadata()) == _by_rank(peer.metadata())
            assert ours.sharding_spec() == TheirSpec(second, [*after])


def _theirs(whole: Tensor, spec: TheirSpec) -> theirs.ShardedTensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    index = _ranks([str(place) for place in spec.placements]).index(rank)
    own = whole.chunk(size, int(spec.dim))[index].contiguous()
    return theirs.ShardedTensor._init_from_local_tensor(own, spec, whole.shape)


def _by_rank(metadata: theirs.ShardedTensorMetadata) -> list[theirs.ShardMetadata]:
    return sorted(metadata.shards_metadata, key=lambda shard: shard.placement.rank())


def _ranks(places: list[str]) -> list[int]:
    return [int(place.removeprefix("rank:").partition("/")[0]) for place in places]


LAYOUTS = [Even(0), Even(1), Even(2), Flat(), Rows(), Block(1000), Whole()]


@ranks(3, timeout_s=120)
@pytest.mark.parametrize("max_extra", [1.25, 2.0])
def test_the_peak_stays_under_the_cap(max_extra: float, world_size: int) -> None:
    """Counts what a rank allocates, the new shard included."""
    whole = torch.arange(90 * 70 * 64, dtype=torch.float32).view(90, 70, 64)
    assert whole.nbytes > transfer.ONE_ROUND_BYTES
    for first, second in itertools.permutations(LAYOUTS, 2):
        source = sharded(whole, first)
        target = placed(second, tuple(whole.shape))
        peak, moved = _peak_bytes(partial(reshard, source, target, max_extra=max_extra))
        larger = max(source.local.nbytes, moved.local.nbytes)
        # A message is cut between elements, so that a round may have one more for each peer.
        assert peak <= max_extra * larger + 8 * world_size, (first, second)
        for region, part in moved.parts():
            assert torch.equal(part, whole[region.slices])


Result = TypeVar("Result")


def _peak_bytes(act: Callable[[], Result]) -> tuple[int, Result]:
    """What a call allocates at its peak, by the profiler's account of the CPU allocator."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        result = act()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak, result


@ranks(2)
def test_a_large_tensor_is_gathered_without_memory_in_between() -> None:
    """Under what the pieces would take as rows of a matrix; `Even(1)` packs a round at a time."""
    whole = torch.arange(5 << 20, dtype=torch.float32).view(1024, 5120)
    for layout in (Even(0), Even(1), Flat(), Whole()):
        tensor = sharded(whole, layout)
        peak, full = _peak_bytes(tensor.full_tensor)
        assert torch.equal(full, whole)
        assert peak <= 2 * whole.nbytes
