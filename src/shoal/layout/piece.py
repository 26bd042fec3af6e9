"""A piece: one rank's part of one parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.errors import UsageError
from shoal.layout.region import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One rank's part of one parameter, in that rank's shard buffer.

    The elements of the regions, each row-major, follow one another without a gap from
    `offset_bytes` on. `shape` is the shape of the local tensor over those bytes: several
    regions cannot have a better one than 1-D. A rank that holds nothing has no regions.
    """

    offset_bytes: int
    shape: tuple[int, ...]
    regions: tuple[Region, ...]

    def __post_init__(self) -> None:
        if self.offset_bytes < 0:
            raise UsageError(f"expected an offset of 0 bytes or more, got {self.offset_bytes}")
        if any(region.numel == 0 for region in self.regions):
            raise UsageError(f"a piece lists no empty region, got {self.regions}")
        if math.prod(self.shape) != sum(region.numel for region in self.regions):
            raise UsageError(f"shape {self.shape} does not have the elements of {self.regions}")

    @property
    def numel(self) -> int:
        """How many elements the rank holds."""
        return math.prod(self.shape)
