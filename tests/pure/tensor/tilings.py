"""Random placements: chunks, rectangles dealt to ranks, and the pieces of layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor

from pure.layout.strategies import layouts_for, spec
from shoal._torch.sharded import EnumerableShardingSpec, ShardMetadata
from shoal.layout import Layout, Region
from shoal.tensor.listed import Listed
from shoal.tensor.packed import Packed
from shoal.tensor.placement import Placement
from shoal.tensor.sharded import ShardedTensor, allocate
from shoal.tensor.spec import ChunkShardingSpec


@dataclass(frozen=True)
class Dealt:
    """Rectangles that cover a tensor, each with the rank that holds it."""

    pieces: tuple[tuple[int, Region], ...]

    def regions_of(self, rank: int) -> tuple[Region, ...]:
        return tuple(region for owner, region in self.pieces if owner == rank and region.numel > 0)

    def holders(self, region: Region) -> list[int]:
        return sorted({owner for owner, piece in self.pieces if piece.overlap(region) is not None})


@dataclass(frozen=True)
class Chunks:
    """As many chunks of a dim as there are ranks here, in this order; others hold nothing."""

    dim: int
    ranks: tuple[int, ...]


Kind: TypeAlias = Dealt | Chunks | Layout
"""What a placement is made of on the ranks; unlike it, this can be sent to them."""


@st.composite
def tilings(draw: st.DrawFn, shape: Sequence[int], max_cuts: int = 5) -> list[Region]:
    """Cut a tensor, and then what came of it, anywhere along any dim; some pieces are empty."""
    regions = [Region.whole(shape)]
    for _ in range(draw(st.integers(0, max_cuts)) if shape else 0):
        region = regions.pop(draw(st.integers(0, len(regions) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, region.sizes[dim]))
        regions += _halves(region, dim, at)
    return draw(st.permutations(regions))


@st.composite
def dealt(draw: st.DrawFn, shape: Sequence[int], num_ranks: int) -> Dealt:
    """Deal the rectangles of a tiling; ranks get any number of them, or none."""
    owners = st.integers(0, num_ranks - 1)
    return Dealt(tuple((draw(owners), region) for region in draw(tilings(shape))))


@st.composite
def chunks(draw: st.DrawFn, shape: Sequence[int], num_ranks: int) -> Chunks:
    """Cut along any dim, for all ranks or some, in any order."""
    ranks = draw(st.permutations(range(num_ranks)))
    return Chunks(draw(st.integers(0, len(shape) - 1)), tuple(ranks[: draw(st.integers(1, 5))]))


@st.composite
def kinds(draw: st.DrawFn, shape: tuple[int, ...], num_ranks: int) -> Kind:
    """Any placement of a tensor."""
    choices: list[st.SearchStrategy[Kind]] = [layouts_for([spec("w", *shape)])]
    if shape and 0 not in shape:  # torch's specs list neither numbers nor what has no elements
        choices += [chunks(shape, num_ranks), dealt(shape, num_ranks)]
    return draw(st.one_of(choices))


def placed(kind: Kind, shape: tuple[int, ...], device: str = "cpu") -> Placement:
    """Make the placement, on a rank of the default group."""
    group = dist.group.WORLD
    assert group is not None
    if isinstance(kind, Layout):
        packing = kind.pack([spec("w", *shape)], group.size())
        return Packed(packing=packing, index=0, group=group, rank=group.rank())
    if isinstance(kind, Chunks):
        places = [f"rank:{rank}/{device}" for rank in kind.ranks]
        return Listed.of_spec(ChunkShardingSpec(kind.dim, [*places]), shape, group)
    shards = [
        ShardMetadata(list(region.offsets), list(region.sizes), f"rank:{rank}/{device}")
        for rank, region in kind.pieces
        if region.numel > 0
    ]
    return Listed.of_spec(EnumerableShardingSpec(shards), shape, group)


def sharded(whole: Tensor, kind: Kind) -> ShardedTensor:
    """This rank's shards of a tensor that every rank has."""
    placement = placed(kind, tuple(whole.shape), str(whole.device))
    tensor = allocate(placement, whole.dtype, whole.device)
    for region, part in tensor.parts():
        part.copy_(whole[region.slices])
    return tensor


def _halves(region: Region, dim: int, at: int) -> list[Region]:
    def with_dim(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:dim], value, *values[dim + 1 :])

    start, size = region.offsets[dim], region.sizes[dim]
    return [
        Region(offsets=region.offsets, sizes=with_dim(region.sizes, at)),
        Region(
            offsets=with_dim(region.offsets, start + at), sizes=with_dim(region.sizes, size - at)
        ),
    ]
