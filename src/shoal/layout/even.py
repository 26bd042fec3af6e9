"""The even packing: every parameter cut along a dim into one chunk per rank.

rank 0  | w rows 0-1 | b 0-1 |      every parameter has its padded chunk at the same
rank 1  | w rows 2-3 | b 2 - |      offset on each rank, as `torch.chunk` and a DTensor's
rank 2  | w row 4  - | - -   |      `Shard(dim)` cut it
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from shoal.errors import UsageError
from shoal.layout.chunk import chunk_bounds, chunk_size
from shoal.layout.packing import Packing, check_packable, shard_step_bytes
from shoal.layout.piece import Piece
from shoal.layout.region import Region
from shoal.layout.spec import ParamSpec, round_up
from shoal.layout.stripe import Stripe


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bands:
    """A parameter as bands of `size` slabs each, of which every rank takes `chunk` per band.

    A slab is what one index into the cut dim selects within a band: the elements of the dims
    after it. A 0-d parameter is one band of one slab of one element.
    """

    num_bands: int
    size: int
    chunk: int
    slab_numel: int

    @classmethod
    def of(cls, param: ParamSpec, dim: int, world_size: int) -> Self:
        if not 0 <= dim < max(len(param.shape), 1):
            raise UsageError(
                f"parameter {param.name!r} of shape {param.shape} cannot be cut along dim {dim}"
            )
        size = param.shape[dim] if param.shape else 1
        return cls(
            num_bands=math.prod(param.shape[:dim]),
            size=size,
            chunk=chunk_size(size, world_size),
            slab_numel=math.prod(param.shape[dim + 1 :]),
        )

    @property
    def chunk_numel(self) -> int:
        """The elements of a full chunk, over all bands."""
        return self.num_bands * self.chunk * self.slab_numel


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenPacking(Packing):
    """Every parameter cut along its own dim; `offsets_bytes` hold on every rank."""

    dims: tuple[int, ...]
    offsets_bytes: tuple[int, ...]
    _bands: tuple[_Bands, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        Packing.__post_init__(self)
        self._check_one_each("dims", self.dims)
        self._check_one_each("offsets_bytes", self.offsets_bytes)
        object.__setattr__(self, "_bands", _bands(self.params, self.dims, self.world_size))
        end = 0
        for param, bands, offset in zip(self.params, self._bands, self.offsets_bytes, strict=True):
            if offset < end or offset % param.align_bytes != 0:
                raise UsageError(f"parameter {param.name!r} cannot start at byte {offset}")
            end = offset + bands.chunk_numel * param.itemsize
        if end > self.shard_bytes:
            raise UsageError(f"{end} bytes of chunks do not fit in {self.shard_bytes}")

    def piece(self, index: int, rank: int) -> Piece:
        """See `Packing.piece`."""
        param = self._param(index)
        self._check_rank(rank)
        bands, dim = self._bands[index], self.dims[index]
        start, stop = chunk_bounds(bands.size, self.world_size, rank)
        if not param.shape:
            sizes, offsets = (() if start < stop else (0,)), ()
        else:
            sizes = (*param.shape[:dim], stop - start, *param.shape[dim + 1 :])
            offsets = (0,) * dim + (start,) + (0,) * (len(param.shape) - dim - 1)
        regions = (Region(offsets=offsets, sizes=sizes),) if math.prod(sizes) > 0 else ()
        return Piece(offset_bytes=self.offsets_bytes[index], shape=sizes, regions=regions)

    def holders(self, index: int, region: Region) -> range:
        """See `Packing.holders`; every rank of the range does hold some."""
        self._check_region(index, region)
        if region.numel == 0:
            return range(0)
        if not region.sizes:
            return range(1)
        chunk, dim = self._bands[index].chunk, self.dims[index]
        start, stop = region.offsets[dim], region.stops[dim]
        return range(start // chunk, (stop - 1) // chunk + 1)

    def stripes(self, index: int) -> tuple[Stripe, ...]:
        """See `Packing.stripes`; there are at most two."""
        param, bands = self._param(index), self._bands[index]
        if param.numel == 0:
            return ()
        num_whole, rest = divmod(bands.size, bands.chunk)
        blocks = ((0, num_whole, bands.chunk), (num_whole, 1, rest))
        return tuple(
            Stripe(
                first_rank=first_rank,
                num_ranks=num_ranks,
                shard_offset=self.offsets_bytes[index] // param.itemsize,
                full_offset=first_rank * bands.chunk * bands.slab_numel,
                numel=num_slabs * bands.slab_numel,
                num_bands=bands.num_bands,
            )
            for first_rank, num_ranks, num_slabs in blocks
            if num_ranks * num_slabs > 0
        )

    def gathered_offset(self, index: int) -> int | None:
        """See `Packing.gathered_offset`."""
        param, bands = self._param(index), self._bands[index]
        is_on_one_rank = bands.size <= bands.chunk or param.numel == 0
        # Chunks touch only where one chunk is the whole of a rank's buffer.
        touch = bands.num_bands == 1 and bands.chunk_numel * param.itemsize == self.shard_bytes
        return self.offsets_bytes[index] if is_on_one_rank or touch else None

    def with_dtypes(self, dtypes: Sequence[torch.dtype]) -> EvenPacking:
        """See `Packing.with_dtypes`."""
        return pack_even(self._recast(dtypes), self.dims, self.world_size)


def pack_even(params: Sequence[ParamSpec], dims: Sequence[int], world_size: int) -> EvenPacking:
    """Lay parameters out one after another, each cut along its own dim."""
    check_packable(params, world_size)
    offsets_bytes, end = [], 0
    for param, bands in zip(params, _bands(params, dims, world_size), strict=True):
        offset = round_up(end, param.align_bytes)
        offsets_bytes.append(offset)
        end = offset + bands.chunk_numel * param.itemsize
    return EvenPacking(
        params=tuple(params),
        world_size=world_size,
        shard_bytes=round_up(end, shard_step_bytes(params)),
        dims=tuple(dims),
        offsets_bytes=tuple(offsets_bytes),
    )


def _bands(params: Sequence[ParamSpec], dims: Sequence[int], world_size: int) -> tuple[_Bands, ...]:
    return tuple(_Bands.of(param, dim, world_size) for param, dim in zip(params, dims, strict=True))
