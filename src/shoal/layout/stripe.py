"""Stripes: a parameter's pieces on many ranks as a few strided blocks, whatever the world size.

The gathered buffer is a matrix with one row per rank. The pieces of a parameter that is cut
along its flattened elements are equal blocks in consecutive rows, but for a shorter last one:

    rank 0   [ .. | a a a a | .. ]
    rank 1   [ .. | a a a a | .. ]     stripe 1: ranks 0-1, 4 elements each
    rank 2   [ .. | a a - - | .. ]     stripe 2: rank 2, 2 elements
    rank 3   [ .. | - - - - | .. ]     (nothing)

A parameter that is cut along an inner dim is as many such bands as there are indices before that
dim; a rank's bands follow one another in its row, and the bands of the parameter in the parameter.
So copying a parameter out of (or a gradient into) the matrix takes two or three strided copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stripe:
    """Equal pieces of one parameter on consecutive ranks; all numbers count elements.

    `numel` elements of each band lie on each rank; `full_offset` counts from a band's start.
    """

    first_rank: int
    num_ranks: int
    shard_offset: int
    full_offset: int
    numel: int
    num_bands: int = 1

    def __post_init__(self) -> None:
        if self.first_rank < 0 or self.shard_offset < 0 or self.full_offset < 0:
            raise UsageError(f"a stripe starts at or after zero, got {self}")
        if self.num_ranks < 1 or self.numel < 1 or self.num_bands < 1:
            raise UsageError(f"a stripe has at least one rank, band and element, got {self}")

    def of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """View the stripe in the gathered matrix, as (num_ranks, num_bands, numel)."""
        ranks = slice(self.first_rank, self.first_rank + self.num_ranks)
        columns = slice(self.shard_offset, self.shard_offset + self.num_bands * self.numel)
        return rows[ranks, columns].unflatten(1, (self.num_bands, self.numel))

    def of_full(self, full: torch.Tensor) -> torch.Tensor:
        """View the stripe in the parameter's flattened elements, in the same shape."""
        columns = slice(self.full_offset, self.full_offset + self.num_ranks * self.numel)
        bands = full.view(self.num_bands, -1)[:, columns]
        return bands.unflatten(1, (self.num_ranks, self.numel)).transpose(0, 1)
