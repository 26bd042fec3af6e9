"""Chunks as `torch.chunk` cuts them, with empty ones for the ranks that get nothing.

A size is cut into pieces of `ceil(size / num_chunks)`; the last one that is not empty may be
shorter, and there may be fewer than `num_chunks`:

    size 5, 4 chunks:   [0 1] [2 3] [4] []
"""

from __future__ import annotations

import torch

from shoal.errors import UsageError
from shoal.layout.region import Region


def chunk_size(size: int, num_chunks: int) -> int:
    """The size of every chunk but the last."""
    _check_num_chunks(num_chunks)
    return -(-size // num_chunks)


def chunk_bounds(size: int, num_chunks: int, rank: int) -> tuple[int, int]:
    """Where chunk `rank` starts and stops; both are `size` when it is empty."""
    step = chunk_size(size, num_chunks)
    if not 0 <= rank < num_chunks:
        raise UsageError(f"chunk {rank} does not exist: there are {num_chunks}, counted from 0")
    start = min(rank * step, size)
    return start, min(start + step, size)


def chunk_region(region: Region, num_chunks: int, index: int, dim: int) -> Region:
    """One chunk of a region; empty ones begin where the region ends."""
    if not -len(region.sizes) <= dim < len(region.sizes):
        raise UsageError(f"dim {dim} is outside of a tensor of size {region.sizes}")
    dim %= len(region.sizes)
    start, stop = chunk_bounds(region.sizes[dim], num_chunks, index)
    offsets, sizes = [*region.offsets], [*region.sizes]
    offsets[dim] += start
    sizes[dim] = stop - start
    return Region(offsets=tuple(offsets), sizes=tuple(sizes))


def chunk_with_empty(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
    """Cut a tensor into exactly `num_chunks` views; the missing ones are 1-D with no element."""
    _check_num_chunks(num_chunks)
    chunks = list(torch.chunk(tensor, num_chunks, dim=dim))
    chunks.extend(tensor.new_empty(0) for _ in range(num_chunks - len(chunks)))
    return chunks


def _check_num_chunks(num_chunks: int) -> None:
    if num_chunks < 1:
        raise UsageError(f"expected 1 chunk or more, got {num_chunks}")
