"""CUDA's caching allocator as arithmetic: what a list of allocations and frees reserves.

Rules of torch's allocator, without its options: sizes are rounded to 512 bytes. Up to 1 MiB comes
from segments of 2 MiB, less than 10 MiB from segments of 20 MiB, more from segments of its own,
rounded to 2 MiB. Of the free blocks of a stream the smallest that suffices is taken, the one with
the lowest address first. It is split if the rest can be of use. Freed neighbours are joined.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

KIB, MIB = 1 << 10, 1 << 20
_MIN_BLOCK = 512
_SMALL = MIB
"""Up to here an allocation is small."""
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_OWN_SEGMENT = 10 * MIB
"""From here on an allocation has a segment of its own."""
_ROUNDING = 2 * MIB


@dataclass(slots=True, eq=False)
class _Block:
    pool: tuple[int, bool]
    address: int
    size: int
    before: _Block | None = None
    after: _Block | None = None
    is_free: bool = True

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.address


@dataclass(slots=True)
class _Pool:
    """The free blocks of one stream, small or large, by size and address."""

    keys: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[tuple[int, int], _Block] = field(default_factory=dict)

    def add(self, block: _Block) -> None:
        insort(self.keys, block.key)
        self.blocks[block.key] = block

    def remove(self, block: _Block) -> None:
        del self.keys[bisect_left(self.keys, block.key)]
        del self.blocks[block.key]

    def smallest(self, size: int) -> _Block | None:
        at = bisect_left(self.keys, (size, 0))
        return self.blocks[self.keys[at]] if at < len(self.keys) else None


class CachingAllocator:
    """The memory of one device."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._held: dict[int, _Block] = {}
        self._next_address = 0
        self.allocated = 0
        self.reserved = 0
        self.allocated_peak = 0
        self.reserved_peak = 0

    def allocate(self, owner: int, num_bytes: int, stream: int = 0) -> int:
        """Give an owner memory; owners are numbers. Returns the bytes that it got."""
        if num_bytes == 0:
            return 0
        size = max(-(-num_bytes // _MIN_BLOCK) * _MIN_BLOCK, _MIN_BLOCK)
        is_small = size <= _SMALL
        pool = self._pools.setdefault((stream, is_small), _Pool())
        block = pool.smallest(size)
        if block is None:
            block = self._segment((stream, is_small), size)
        else:
            pool.remove(block)
        rest = block.size - size
        if rest >= _MIN_BLOCK if is_small else rest > _SMALL:
            split = _Block(block.pool, block.address + size, rest, block, block.after)
            if block.after is not None:
                block.after.before = split
            block.after, block.size = split, size
            pool.add(split)
        block.is_free = False
        self._held[owner] = block
        self.allocated += block.size
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return block.size

    def free(self, owner: int) -> int:
        """Take an owner's memory back, if it has any; returns how much it was."""
        block = self._held.pop(owner, None)
        if block is None:
            return 0
        freed = block.size
        self.allocated -= freed
        block.is_free = True
        pool = self._pools[block.pool]
        before, after = block.before, block.after
        if before is not None and before.is_free:
            pool.remove(before)
            before.size += block.size
            before.after = after
            if after is not None:
                after.before = before
            block = before
        if after is not None and after.is_free:
            pool.remove(after)
            block.size += after.size
            block.after = after.after
            if after.after is not None:
                after.after.before = block
        pool.add(block)
        return freed

    def empty_cache(self) -> None:
        """Give segments back of which nothing is in use."""
        for pool in self._pools.values():
            for block in list(pool.blocks.values()):
                if block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def reset_peaks(self) -> None:
        """Let peaks begin from what is in use now."""
        self.allocated_peak, self.reserved_peak = self.allocated, self.reserved

    def _segment(self, pool: tuple[int, bool], size: int) -> _Block:
        if size <= _SMALL:
            segment = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            segment = _LARGE_SEGMENT
        else:
            segment = -(-size // _ROUNDING) * _ROUNDING
        block = _Block(pool, self._next_address, segment)
        self._next_address += segment
        self.reserved += segment
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return block


class PlainAllocator(CachingAllocator):
    """The memory of a host as tensors see it: what is asked for, and given back at once."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}

    def allocate(self, owner: int, num_bytes: int, stream: int = 0) -> int:
        """See `CachingAllocator`; nothing is rounded."""
        self._sizes[owner] = num_bytes
        self.allocated += num_bytes
        self.reserved = self.allocated
        self.allocated_peak = self.reserved_peak = max(self.allocated_peak, self.allocated)
        return num_bytes

    def free(self, owner: int) -> int:
        """See `CachingAllocator`; nothing is kept."""
        freed = self._sizes.pop(owner, 0)
        self.allocated -= freed
        self.reserved = self.allocated
        return freed
