"""The caching allocator's rules, and that no rule breaks what an allocator must keep."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.plan.allocator import MIB, CachingAllocator


@pytest.mark.parametrize(
    ("num_bytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),  # a rest of up to 1 MiB is not split off
        (20 * MIB + 1, 20 * MIB + 512, 22 * MIB),
    ],
)
def test_one_allocation(num_bytes: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    assert allocator.allocate(1, num_bytes) == allocated
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_the_smallest_free_block_is_taken_and_split() -> None:
    allocator = CachingAllocator()
    for owner, size in ((1, 64), (2, 32)):
        allocator.allocate(owner, size * MIB)
    allocator.free(1)
    allocator.free(2)
    allocator.allocate(3, 30 * MIB)
    allocator.allocate(4, 60 * MIB)
    assert allocator.reserved == 96 * MIB
    allocator.allocate(5, 2 * MIB)  # what is left of the smaller one
    assert allocator.reserved == 96 * MIB


def test_streams_share_nothing() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, 32 * MIB, stream=0)
    allocator.free(1)
    allocator.allocate(2, 32 * MIB, stream=1)
    assert allocator.reserved == 64 * MIB


def test_peaks_begin_anew() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, 32 * MIB)
    allocator.free(1)
    allocator.reset_peaks()
    assert (allocator.allocated_peak, allocator.reserved_peak) == (0, 32 * MIB)
    allocator.empty_cache()
    assert allocator.reserved == 0


sizes = st.one_of(st.integers(1, 4096), st.integers(1, 4 * MIB), st.integers(MIB, 64 * MIB))
steps = st.lists(st.tuples(st.booleans(), sizes, st.integers(0, 1)), max_size=60)


@given(steps)
def test_blocks_never_overlap_and_come_back_whole(taken: list[tuple[bool, int, int]]) -> None:
    allocator = CachingAllocator()
    alive: dict[int, int] = {}
    for owner, (frees, size, stream) in enumerate(taken):
        if frees and alive:
            oldest = next(iter(alive))
            assert allocator.free(oldest) == alive.pop(oldest)
        else:
            alive[owner] = allocator.allocate(owner, size, stream)
            assert alive[owner] >= size
        blocks = sorted((one.address, one.size) for one in allocator._held.values())
        for (start, length), (following, _) in pairwise(blocks):
            assert start + length <= following
        assert allocator.allocated == sum(alive.values()) <= allocator.reserved
    for owner in alive:
        allocator.free(owner)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (0, 0)
