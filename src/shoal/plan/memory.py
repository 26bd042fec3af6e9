"""Notes played through the allocator: how much memory a run needs, when, and for what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.plan import notes
from shoal.plan.allocator import CachingAllocator
from shoal.plan.notes import Note


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryForecast:
    """The memory of a stretch of a run."""

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    by_category: Mapping[str, int]
    """What is alive at the peak, by what it is for; rounded as the allocator rounds."""
    peak_moment: str
    """The last moment that has a name before the peak."""


def play(
    taken: Sequence[Note],
    purposes: Mapping[int, str],
    *,
    begin: int,
    end: int,
    allocator: CachingAllocator | None = None,
    seen: list[tuple[int, dict[str, int]]] | None = None,
) -> MemoryForecast:
    """Play a run from its first note; the peak is looked for between two places in it.

    The allocator is a new one; CUDA's unless another is given. `seen` gets what was alive at each
    place between the two at which memory came.
    """
    allocator = allocator or CachingAllocator()
    alive: Counter[str] = Counter()
    at_peak: dict[str, int] = {}
    peak = -1
    where = moment = ""
    for place, note in enumerate(taken[:end]):
        if place == begin:
            allocator.reset_peaks()
            peak, at_peak = allocator.allocated, dict(alive)
            if seen is not None:
                seen.append((place, dict(alive)))
        match note:
            case notes.Allocate(owner, num_bytes, stream):
                alive[purposes[owner]] += allocator.allocate(owner, num_bytes, stream)
                if place >= begin and allocator.allocated > peak:
                    peak, where, at_peak = allocator.allocated, moment, dict(alive)
                if place >= begin and seen is not None:
                    seen.append((place, dict(alive)))
            case notes.Free(owner):
                alive[purposes[owner]] -= allocator.free(owner)
            case notes.EmptyCache():
                allocator.empty_cache()
            case notes.Moment(name, unit):
                moment = f"{name} {unit}".strip()
            case _:
                pass
    return MemoryForecast(
        allocated_peak_bytes=allocator.allocated_peak,
        reserved_peak_bytes=allocator.reserved_peak,
        by_category={name: size for name, size in sorted(at_peak.items()) if size},
        peak_moment=where,
    )
