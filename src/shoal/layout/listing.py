"""A listing: regions and their ranks, one by one, where no arithmetic tells who holds what."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate

from shoal.layout.region import Region


class Listing:
    """Regions of a tensor with the ranks that hold them; ranks may hold the same elements.

    Regions are sorted along the dim in which they differ most. So the holders of a region are found
    among its neighbours, and a rank need not walk all ranks to find its peers.
    """

    __slots__ = ("_by_rank", "_dim", "_reached", "_sorted", "_starts")

    def __init__(self, held: Iterable[tuple[int, Region]]) -> None:
        pairs = [(rank, region) for rank, region in held if region.numel > 0]
        by_rank: dict[int, list[Region]] = {}
        for rank, region in pairs:
            by_rank.setdefault(rank, []).append(region)
        self._by_rank = {rank: tuple(regions) for rank, regions in by_rank.items()}
        ndim = len(pairs[0][1].sizes) if pairs else 0
        self._dim = max(range(ndim), key=lambda dim: _num_offsets(pairs, dim), default=None)
        if self._dim is not None:
            dim = self._dim
            pairs.sort(key=lambda pair: pair[1].offsets[dim])
            self._starts = [region.offsets[dim] for _, region in pairs]
            # How far any region up to here reaches: sorted too, so that it can be searched.
            self._reached = list(accumulate((r.stops[dim] for _, r in pairs), max))
        self._sorted = pairs

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold something."""
        return tuple(sorted(self._by_rank))

    @property
    def numel(self) -> int:
        """The number of elements held; an element counts once for each rank that holds it."""
        return sum(region.numel for _, region in self._sorted)

    def regions_of(self, rank: int) -> tuple[Region, ...]:
        """The regions that a rank holds, in the order given; none is empty."""
        return self._by_rank.get(rank, ())

    def holders(self, region: Region) -> tuple[int, ...]:
        """The ranks that hold an element of a region."""
        near = self._sorted
        if self._dim is not None:
            first = bisect_right(self._reached, region.offsets[self._dim])
            near = near[first : bisect_left(self._starts, region.stops[self._dim])]
        return tuple(sorted({rank for rank, held in near if held.overlap(region) is not None}))


def _num_offsets(pairs: list[tuple[int, Region]], dim: int) -> int:
    return len({region.offsets[dim] for _, region in pairs})
