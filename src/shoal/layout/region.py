"""Rectangles of a tensor's elements, which moves between layouts are made of.

A 1-D range of a row-major tensor is a few rectangles. For shape (3, 4), elements [2, 9):

    . . a a     a: rows [0, 1), columns [2, 4)
    b b b b     b: rows [1, 2), columns [0, 4)
    c . . .     c: rows [2, 3), columns [0, 1)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import ge, le
from typing import Self

from shoal.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The elements from `offsets` on, `sizes` of them along each dim; a 0-d one is one element."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise UsageError(
                f"a region needs as many offsets as sizes, got {self.offsets} and {self.sizes}"
            )
        if any(value < 0 for value in (*self.offsets, *self.sizes)):
            raise UsageError(
                f"a region needs offsets and sizes of 0 or more, got {self.offsets}, {self.sizes}"
            )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
        """All elements of a tensor."""
        return cls(offsets=(0,) * len(shape), sizes=tuple(shape))

    @property
    def numel(self) -> int:
        """How many elements the region has."""
        return math.prod(self.sizes)

    @property
    def stops(self) -> tuple[int, ...]:
        """One past the last index along each dim."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that views the region in a tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))

    def overlap(self, other: Region) -> Region | None:
        """The elements that both regions have, or None where there are none."""
        self._check_same_ndim(other)
        offsets = tuple(map(max, self.offsets, other.offsets))
        stops = tuple(map(min, self.stops, other.stops))
        if any(stop <= offset for offset, stop in zip(offsets, stops, strict=True)):
            return None
        sizes = tuple(stop - offset for offset, stop in zip(offsets, stops, strict=True))
        return Region(offsets=offsets, sizes=sizes)

    def contains(self, other: Region) -> bool:
        """Whether every element of the other region is in this one."""
        self._check_same_ndim(other)
        starts_inside = all(map(le, self.offsets, other.offsets))
        return other.numel == 0 or (starts_inside and all(map(ge, self.stops, other.stops)))

    def relative_to(self, outer: Region) -> Region:
        """The same elements, counted from the first one of a region that contains them."""
        if not outer.contains(self):
            raise UsageError(f"{self} is not inside {outer}")
        offsets = tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True))
        return Region(offsets=offsets, sizes=self.sizes)

    def _check_same_ndim(self, other: Region) -> None:
        if len(self.sizes) != len(other.sizes):
            raise UsageError(f"regions of different tensors: {self} and {other}")


def flat_regions(shape: Sequence[int], start: int, stop: int) -> tuple[Region, ...]:
    """Elements [start, stop) of a row-major tensor, as at most 2·ndim - 1 regions in order."""
    numel = math.prod(shape)
    if not 0 <= start <= stop <= numel:
        raise UsageError(
            f"elements [{start}, {stop}) are not a range of a tensor of shape {tuple(shape)}, "
            f"which has {numel}"
        )
    if start == stop:
        return ()
    return tuple(_rectangles(tuple(shape), start, stop))


def flat_span(shape: Sequence[int], region: Region) -> tuple[int, int]:
    """The smallest range of row-major elements that has all of a region in it."""
    if not Region.whole(shape).contains(region):
        raise UsageError(f"{region} is not inside a tensor of shape {tuple(shape)}")
    if region.numel == 0:
        return 0, 0
    first = last = 0
    for size, offset, stop in zip(shape, region.offsets, region.stops, strict=True):
        first = first * size + offset
        last = last * size + stop - 1
    return first, last + 1


def _rectangles(
    shape: tuple[int, ...], start: int, stop: int, outer: tuple[int, ...] = ()
) -> Iterator[Region]:
    """The regions of a range that is not empty: part of a row, whole rows, part of a row.

    `outer` are the indices that select the tensor of this shape from the one asked for.
    """
    ones = (1,) * len(outer)
    if not shape:
        yield Region(offsets=outer, sizes=ones)
        return
    inner = shape[1:]
    row_numel = math.prod(inner)
    row, begin = divmod(start, row_numel)
    last_row, end = divmod(stop, row_numel)
    if begin > 0:
        rest = end if row == last_row else row_numel
        yield from _rectangles(inner, begin, rest, (*outer, row))
        if row == last_row:
            return
        row += 1
    if row < last_row:
        offsets = (*outer, row, *(0,) * len(inner))
        yield Region(offsets=offsets, sizes=(*ones, last_row - row, *inner))
    if end > 0:
        yield from _rectangles(inner, 0, end, (*outer, last_row))
