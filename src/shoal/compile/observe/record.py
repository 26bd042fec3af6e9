"""What is known of one compilation: pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from shoal.compile.passes.contract import Report


class CacheUse(StrEnum):
    """What the cache did for a compilation."""

    OFF = "off"
    HIT = "hit"
    """Nothing was traced."""
    STORED = "stored"
    """It was traced, and the next process will not have to."""
    REFUSED = "refused"
    """It was traced, and cannot be stored exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRecord:
    """One function that was compiled."""

    number: int
    """Counted in this process, from 0."""
    where: str
    """File and line that the graph begins at, where that is known."""
    num_inputs: int
    num_outputs: int
    num_mutated: int
    """Inputs that are written to."""
    num_bases: int
    """Tensors that are returned only because outputs are views of them."""
    trains: bool
    num_saved: int
    """Tensors that forward keeps for backward."""
    saved_bytes: int
    num_nodes_before: int
    """Calls in the graph as it came; 0 where no graph did."""
    num_nodes_forward: int
    num_nodes_backward: int
    num_collectives: int
    """In both graphs."""
    cache: CacheUse
    cache_note: str = ""
    """Why it cannot be stored."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By stage, in the order in which they ran; backward's when it has run."""
    passes: Mapping[str, Report] = field(default_factory=dict)
    """What each pass did to the graphs, by stage of `passes/pipeline.py`; of a graph that the cache
    had, from its collectives on."""

    def __post_init__(self) -> None:
        for name in ("seconds", "passes"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @property
    def total_seconds(self) -> float:
        """Of all stages."""
        return sum(self.seconds.values())
