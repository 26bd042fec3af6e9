"""Which gradients travel together. Pure.

order     a b c d e f          limits 4, 6 bytes; one dtype
bytes     2 3 1 4 9 1
buckets  [a b][c d e]  [f]     a bucket is closed by the gradient that fills it
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from shoal.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A gradient to be put into a bucket."""

    num_bytes: int
    key: Hashable
    """Dtype and device: gradients of different keys cannot share memory."""

    def __post_init__(self) -> None:
        if self.num_bytes < 0:
            raise UsageError(f"a gradient cannot have {self.num_bytes} bytes")


def assign(
    items: Sequence[Item], order: Sequence[int], limits_bytes: Sequence[int]
) -> list[tuple[int, ...]]:
    """Cut `order`, in which gradients become ready, into buckets of indices into `items`.

    A bucket is closed when it has reached its limit; the last limit holds for all that follow.
    Every key counts its limits by itself. Buckets come in the order in which they are complete.
    """
    if not limits_bytes:
        raise UsageError("expected at least one limit for the size of a bucket, got none")
    if sorted(order) != list(range(len(items))):
        raise UsageError(f"expected every one of {len(items)} gradients once, got {list(order)}")
    opened: dict[Hashable, list[int]] = {}
    num_bytes: dict[Hashable, int] = {}
    num_closed: dict[Hashable, int] = {}
    closed: list[tuple[int, ...]] = []
    for index in order:
        item = items[index]
        bucket = opened.setdefault(item.key, [])
        bucket.append(index)
        num_bytes[item.key] = num_bytes.get(item.key, 0) + item.num_bytes
        limit = limits_bytes[min(num_closed.get(item.key, 0), len(limits_bytes) - 1)]
        if num_bytes[item.key] >= limit:
            closed.append(tuple(opened.pop(item.key)))
            num_bytes[item.key] = 0
            num_closed[item.key] = num_closed.get(item.key, 0) + 1
    closed.extend(tuple(bucket) for bucket in opened.values())
    position = {index: place for place, index in enumerate(order)}
    return sorted(closed, key=lambda bucket: position[bucket[-1]])
