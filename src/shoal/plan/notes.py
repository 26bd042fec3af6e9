"""What a run did, in order: memory that came and went, kernels, collectives, who waits for whom.

An imagined device takes such notes of the engine's own step. The allocator (`memory`) and the lanes
(`time`) are played from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from shoal.comm.collectives import Kind

COMPUTE = 0
"""The stream that the model computes on; the engine's lanes have higher numbers."""


@dataclass(frozen=True, slots=True)
class Allocate:
    """Memory was taken."""

    owner: int
    num_bytes: int
    stream: int


@dataclass(frozen=True, slots=True)
class Free:
    """An owner's memory was given back."""

    owner: int


@dataclass(frozen=True, slots=True)
class EmptyCache:
    """The allocator was asked to give back what nobody uses."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """An operator ran."""

    name: str
    flops: int
    num_bytes: int
    """Read and written."""
    stream: int
    dtype: str
    shape: tuple[int, ...] = ()
    took_us: float | None = None
    """As it was measured, if it was."""


@dataclass(frozen=True, slots=True)
class Collective:
    """Collectives were launched together."""

    kind: Kind
    num_bytes: int
    num_ranks: int
    stream: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A stream has come so far."""

    mark: int
    stream: int


@dataclass(frozen=True, slots=True)
class Wait:
    """A stream goes on when another has come to a mark."""

    mark: int
    stream: int


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that people have a name for: a phase of the step, a unit's action."""

    name: str
    unit: str = ""


Note: TypeAlias = Allocate | Free | EmptyCache | Kernel | Collective | Mark | Wait | Moment
