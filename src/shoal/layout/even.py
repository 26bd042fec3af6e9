"""The even packing: every parameter cut along a dim into one chunk per rank.

rank 0  | w rows 0-1 | b 0-1 |      every parameter has its padded chunk at the same
rank 1  | w rows 2-3 | b 2 - |      offset on each rank, as `torch.chunk` and a DTensor's
rank 2  | w row 4  - | - -   |      `Shard(dim)` cut it

gathered at once        | w 0-1 | b 0-1 | w 2-3 | b 2 - | w 4 - | - - |     a copy makes w and b
w in its own section    | w 0-1 | w 2-3 | w 4 - | b 0-1 | b 2 - | - - |     w is there

Chunks of dim 0 that are gathered beside each other are the parameter, with the padding behind it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from shoal.errors import UsageError
from shoal.layout.chunk import chunk_bounds, chunk_size
from shoal.layout.packing import Packing, check_packable, shard_step_bytes
from shoal.layout.piece import Piece
from shoal.layout.region import Region
from shoal.layout.spec import ALIGN_NUMEL, ParamSpec, round_up
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

    @property
    def can_be_alone(self) -> bool:
        """Whether chunks beside each other are the parameter, and leave the next one aligned."""
        return self.num_bands == 1 and self.chunk_numel > 0 and self.chunk_numel % ALIGN_NUMEL == 0


ALONE_NUMEL = 2 << 20
"""From here on a parameter is a section: a collective more costs less than to copy it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenPacking(Packing):
    """Every parameter cut along its own dim; `offsets_bytes` hold on every rank."""

    dims: tuple[int, ...]
    offsets_bytes: tuple[int, ...]
    alone: tuple[int, ...] = ()
    """The parameters that are a section each, in the order of their bytes; the rest comes last."""
    _bands: tuple[_Bands, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        Packing.__post_init__(self)
        self._check_one_each("dims", self.dims)
        self._check_one_each("offsets_bytes", self.offsets_bytes)
        bands = _bands(self.params, self.dims, self.world_size)
        object.__setattr__(self, "_bands", bands)
        ends = [
            offset + one.chunk_numel * param.itemsize
            for param, one, offset in zip(self.params, bands, self.offsets_bytes, strict=True)
        ]
        end = 0
        for index in sorted(range(len(ends)), key=lambda i: (self.offsets_bytes[i], ends[i])):
            param, offset = self.params[index], self.offsets_bytes[index]
            if offset < end or offset % param.align_bytes != 0:
                raise UsageError(f"parameter {param.name!r} cannot start at byte {offset}")
            end = ends[index]
        start = 0
        for index in self.alone:
            if self.offsets_bytes[index] != start or not bands[index].can_be_alone:
                raise UsageError(f"parameter {self.params[index].name!r} cannot be a section")
            start = ends[index]
        if end > self.shard_bytes:
            raise UsageError(f"{end} bytes of chunks do not fit in {self.shard_bytes}")

    @property
    def sections(self) -> tuple[range, ...]:
        """See `Packing.sections`."""
        found = [self.section_of(index) for index in self.alone]
        rest = self._rest
        return (*found, rest) if rest or not found else tuple(found)

    def section_of(self, index: int) -> range:
        """See `Packing.section_of`."""
        if index not in self.alone:
            return self._rest
        start, bands = self.offsets_bytes[index], self._bands[index]
        return range(start, start + bands.chunk_numel * self.params[index].itemsize)

    @property
    def _rest(self) -> range:
        start = self.section_of(self.alone[-1]).stop if self.alone else 0
        return range(start, self.shard_bytes)

    def in_sections(self) -> EvenPacking:
        """See `Packing.in_sections`: small parameters, and other dims' chunks, stay together."""
        alone = [
            index
            for index, (param, bands) in enumerate(zip(self.params, self._bands, strict=True))
            if param.numel >= ALONE_NUMEL and bands.can_be_alone
        ]
        return pack_even(self.params, self.dims, self.world_size, alone)

    def in_one_section(self) -> EvenPacking:
        """See `Packing.in_one_section`."""
        return replace(self, alone=()) if self.alone else self

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
        start = self.section_of(index).start
        num_whole, rest = divmod(bands.size, bands.chunk)
        blocks = ((0, num_whole, bands.chunk), (num_whole, 1, rest))
        return tuple(
            Stripe(
                first_rank=first_rank,
                num_ranks=num_ranks,
                shard_offset=(self.offsets_bytes[index] - start) // param.itemsize,
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
        section = self.section_of(index)
        is_on_one_rank = bands.size <= bands.chunk or param.numel == 0
        # Chunks touch only where one chunk is the whole of a section.
        touch = bands.num_bands == 1 and bands.chunk_numel * param.itemsize == len(section)
        if not (is_on_one_rank or touch):
            return None
        return self.world_size * section.start + self.offsets_bytes[index] - section.start

    def standing_for(self, params: Sequence[ParamSpec]) -> EvenPacking:
        """See `Packing.standing_for`."""
        self._check_one_each("params", params)
        alone = self.alone
        if alone:
            bands = _bands(params, self.dims, self.world_size)
            alone = [index for index in alone if bands[index].can_be_alone]
        return pack_even(params, self.dims, self.world_size, alone)


def pack_even(
    params: Sequence[ParamSpec],
    dims: Sequence[int],
    world_size: int,
    alone: Collection[int] = (),
) -> EvenPacking:
    """Lay parameters out one after another, each cut along its own dim; first those alone."""
    check_packable(params, world_size)
    bands = _bands(params, dims, world_size)
    order = _order(params, alone)
    offsets_bytes, end = [0] * len(params), 0
    for index in order:
        offset = round_up(end, params[index].align_bytes)
        offsets_bytes[index] = offset
        end = offset + bands[index].chunk_numel * params[index].itemsize
    return EvenPacking(
        params=tuple(params),
        world_size=world_size,
        shard_bytes=round_up(end, shard_step_bytes(params)),
        dims=tuple(dims),
        offsets_bytes=tuple(offsets_bytes),
        alone=tuple(order[: len(alone)]),
    )


def _order(params: Sequence[ParamSpec], alone: Collection[int]) -> list[int]:
    """The parameters in the order of their bytes: with wide elements first, nothing is between."""
    first = sorted(alone, key=lambda index: (-params[index].itemsize, index))
    return [*first, *(index for index in range(len(params)) if index not in alone)]


def _bands(params: Sequence[ParamSpec], dims: Sequence[int], world_size: int) -> tuple[_Bands, ...]:
    return tuple(_Bands.of(param, dim, world_size) for param, dim in zip(params, dims, strict=True))
