"""How large a bucket becomes: what travels together is cut by bytes. Pure.

order     a b c d e f          limits 4, then 6 bytes; one dtype
bytes     2 3 1 4 9 1
buckets  [a b][c d e]  [f]     with `overshoot`: a bucket is closed by the gradient that fills it

`replicate` cuts gradients, broadcasts cut parameters, and the passes over graphs cut collectives.
Sizes count for each key by itself: what has another dtype, device or group is in other buckets.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from shoal.errors import UsageError

MIB = 2**20
BUCKET_MIB = 25.0
"""The size that torch's DDP has by default too."""
FIRST_BUCKET_MIB = 1.0
"""The first bucket is small, so that communication starts soon after backward."""
FIRST_BUCKET_BYTES = int(FIRST_BUCKET_MIB * MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How large buckets become."""

    num_bytes: int
    first_bytes: int | None = None
    """Of the first bucket of each key."""
    overshoot: bool = False
    """Whether a bucket is full once it reaches its size, as DDP's are, or must stay within it."""

    def __post_init__(self) -> None:
        for name, size in (("num_bytes", self.num_bytes), ("first_bytes", self.first_bytes)):
            if size is not None and size <= 0:
                raise UsageError(f"expected a bucket size above 0, got {name}={size}")

    def is_full(self, number: int, num_bytes: int, more_bytes: int) -> bool:
        """Whether a bucket that holds something has no place for more; its number from 0."""
        limit = (number == 0 and self.first_bytes) or self.num_bytes
        return num_bytes >= limit if self.overshoot else num_bytes + more_bytes > limit

    @classmethod
    def of_ddp(cls, bucket_size_mb: float, first_bucket_mb: float = FIRST_BUCKET_MIB) -> Limits:
        """A small first bucket, and others that are full once they reach a size."""
        if bucket_size_mb <= 0:
            raise UsageError(f"expected a bucket size above 0 MB, got {bucket_size_mb}")
        return cls(
            num_bytes=max(1, int(bucket_size_mb * MIB)),
            first_bytes=max(1, int(first_bucket_mb * MIB)),
            overshoot=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A tensor to be put into a bucket."""

    num_bytes: int
    key: Hashable
    """Dtype and device: tensors of different keys cannot share memory."""

    def __post_init__(self) -> None:
        if self.num_bytes < 0:
            raise UsageError(f"a tensor cannot have {self.num_bytes} bytes")


def assign(items: Sequence[Item], order: Sequence[int], limits: Limits) -> list[tuple[int, ...]]:
    """Cut `order`, in which items become ready, into buckets of indices into `items`.

    Buckets come in the order in which they are complete.
    """
    if sorted(order) != list(range(len(items))):
        raise UsageError(f"expected every one of {len(items)} gradients once, got {list(order)}")
    buckets: dict[Hashable, list[list[int]]] = {}
    held: dict[Hashable, int] = {}
    for index in order:
        key, num_bytes = items[index].key, items[index].num_bytes
        own = buckets.setdefault(key, [])
        if not own or limits.is_full(len(own) - 1, held[key], num_bytes):
            own.append([])
            held[key] = 0
        own[-1].append(index)
        held[key] += num_bytes
    position = {index: place for place, index in enumerate(order)}
    complete = [tuple(bucket) for own in buckets.values() for bucket in own]
    return sorted(complete, key=lambda bucket: position[bucket[-1]])
