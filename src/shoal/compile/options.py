"""The options of `torch.compile(backend="shoal", options={…})`, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from shoal.comm.buckets import BUCKET_MIB
from shoal.compile.observe.logs import topics_of
from shoal.compile.passes.contract import Pipeline
from shoal.errors import UsageError

InnerName = Literal["direct", "inductor"]
PartitionName = Literal["min_cut", "default"]
PrefetchName = Literal["early", "just_in_time"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """Options of the backend, with their defaults."""

    inner: InnerName = "direct"
    """What makes a function of a graph: its operators called one by one, or Inductor."""
    cudagraphs: bool = False
    """Whether Inductor records CUDA graphs."""
    partition: PartitionName = "min_cut"
    """What backward gets: the fewest bytes, or everything that it reads."""
    memory_budget: float = 1.0
    """The share of what is saved for backward that may stay; the rest is computed again."""
    bucket_mb: float = BUCKET_MIB
    """Up to which size collectives of one kind become one."""
    in_flight_mb: float | None = None
    """How much may be on its way at a time; None: the largest collectives,
    one more than units are gathered ahead."""
    prefetch: PrefetchName = "early"
    """When gathers start: as early as there is room, or by a model of compute and link."""
    passes: Callable[[Pipeline], Pipeline] | None = None
    """What edits the passes over collectives: it is given the standard ones for each graph."""
    cache: bool = True
    """Whether what was traced is kept for other processes, and found again."""
    logs: str = ""
    """What to log, as `SHOAL_LOGS` says it: topics, separated by commas."""

    def __post_init__(self) -> None:
        topics_of(self.logs)
        for name, allowed in (
            ("inner", get_args(InnerName)),
            ("partition", get_args(PartitionName)),
            ("prefetch", get_args(PrefetchName)),
        ):
            if getattr(self, name) not in allowed:
                raise UsageError(
                    f"option {name!r} of the shoal backend must be one of {', '.join(allowed)}; "
                    f"got {getattr(self, name)!r}"
                )
        if self.cudagraphs and self.inner != "inductor":
            raise UsageError(
                "option 'cudagraphs' of the shoal backend needs inner='inductor', which records "
                f"them; got inner={self.inner!r}"
            )
        for name in ("bucket_mb", "in_flight_mb"):
            size = getattr(self, name)
            if size is not None and size <= 0:
                raise UsageError(
                    f"option {name!r} of the shoal backend must be above 0; got {size}"
                )
        if self.passes is not None and not callable(self.passes):
            raise UsageError(
                "option 'passes' of the shoal backend must be a function that takes a Pipeline of "
                f"shoal.passes and returns one; got {self.passes!r}"
            )
        if not 0 <= self.memory_budget <= 1:
            raise UsageError(
                "option 'memory_budget' of the shoal backend must be from 0 to 1; got "
                f"{self.memory_budget}"
            )

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> BackendOptions:
        """From the dictionary that `torch.compile` takes."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(options or {}) - known)
        if unknown:
            raise UsageError(
                f"the shoal backend has no option {', '.join(map(repr, unknown))}; it knows "
                f"{', '.join(sorted(known))}"
            )
        return cls(**(options or {}))
