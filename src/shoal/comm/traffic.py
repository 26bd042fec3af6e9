"""How many collectives a group ran, over how many bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shoal.comm.calls import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """A number of collectives, with their bytes.

    Bytes are those of the whole buffer: what an all-gather writes, a reduce-scatter reads, an
    all-reduce reduces. Collectives coalesced into one launch count once.
    """

    num_collectives: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A reading of a group's counters."""

    by_kind: Mapping[Kind, Count]
    """Kinds that did not occur are absent."""

    @property
    def num_collectives(self) -> int:
        """Collectives of all kinds."""
        return sum(count.num_collectives for count in self.by_kind.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all kinds."""
        return sum(count.num_bytes for count in self.by_kind.values())


class Meter:
    """The counters themselves."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[Kind, list[int]] = {}

    def reset(self) -> None:
        """Start again from zero."""
        self._counts.clear()

    def count(self, kind: Kind, num_bytes: int) -> None:
        """Note one launch."""
        counts = self._counts.setdefault(kind, [0, 0])
        counts[0] += 1
        counts[1] += num_bytes

    def read(self) -> Traffic:
        """Take a reading that later launches leave alone."""
        return Traffic(
            by_kind=MappingProxyType(
                {
                    kind: Count(num_collectives=num_collectives, num_bytes=num_bytes)
                    for kind, (num_collectives, num_bytes) in self._counts.items()
                }
            )
        )
