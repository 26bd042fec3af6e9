"""Resharding on NCCL: bit by bit, and within its memory."""

from __future__ import annotations

import itertools

import pytest
import torch

from harness import nccl_ranks
from pure.layout.strategies import DTYPES, spec
from pure.tensor.test_gather import fetch_own
from pure.tensor.test_reshard import CORNERS, there_and_back
from pure.tensor.tilings import Chunks, placed, sharded
from shoal.layout import Block, Even, Flat, Region, Rows, Whole
from shoal.tensor.reshard import reshard

LAYOUTS = [Even(0), Even(1), Flat(), Rows(), Block(100_000), Whole()]


@nccl_ranks(2, 4)
def test_there_and_back(world_size: int) -> None:
    """Ranks that hold nothing, regular patterns and irregular ones, in every dtype."""
    backward = tuple(reversed(range(world_size)))
    kinds = [Chunks(0, (1, 0)), Chunks(1, backward), CORNERS, Flat(), Whole()]
    pairs = itertools.permutations(kinds, 2)
    for (first, second), dtype in zip(pairs, itertools.cycle(DTYPES)):
        there_and_back(spec("w", 6, 8, dtype=dtype), first, second, "cuda:0")


@nccl_ranks(2, 4)
def test_fetch(world_size: int) -> None:
    asked = [
        None if rank == 0 else Region(offsets=(0, rank), sizes=(5, 3)) for rank in range(world_size)
    ]
    for kind in (Chunks(0, (1, 0)), CORNERS, Flat()):
        fetch_own(spec("w", 6, 8), kind, asked, "cuda:0")


@nccl_ranks(2)
@pytest.mark.parametrize("max_extra", [1.25, 2.0])
def test_the_peak_stays_under_the_cap(max_extra: float) -> None:
    whole = torch.arange(4096 * 4096, dtype=torch.float32, device="cuda:0").view(4096, 4096)
    for first, second in itertools.permutations(LAYOUTS, 2):
        source, target = sharded(whole, first), placed(second, (4096, 4096), "cuda:0")
        reshard(source, target)  # NCCL makes its own buffers at first
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        moved = reshard(source, target, max_extra=max_extra)
        peak = torch.cuda.max_memory_allocated() - before
        larger = max(source.local.nbytes, moved.local.nbytes)
        # The allocator rounds each of a few blocks up to 2 MiB at most, and messages to an element.
        assert peak <= max_extra * larger + (4 << 20), (first, second)
        for region, part in moved.parts():
            assert torch.equal(part, whole[region.slices])
