"""A network as two numbers, and what a collective costs on it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.comm.calls import Kind
from shoal.errors import UsageError

# How many times its bytes a collective sends over one rank's link, on a ring of infinitely many
# ranks; where pieces go around, a ring of N ranks sends (N - 1) / N of that.
_PIECEWISE = {
    Kind.ALL_GATHER: 1.0,
    Kind.REDUCE_SCATTER: 1.0,
    Kind.ALL_REDUCE: 2.0,
    Kind.ALL_TO_ALL: 1.0,
    Kind.GATHER: 1.0,
    Kind.SCATTER: 1.0,
}
_WHOLE = {Kind.BROADCAST: 1.0, Kind.REDUCE: 1.0, Kind.SEND: 1.0, Kind.RECEIVE: 1.0}


@dataclass(frozen=True, slots=True)
class Network:
    """A link model: a collective takes latency + bytes over the link / bandwidth."""

    name: str
    bandwidth_gb_per_s: float | None
    """10⁹ bytes per second in each direction, per rank; None is infinitely many."""
    latency_us: float

    def __post_init__(self) -> None:
        bandwidth = self.bandwidth_gb_per_s
        if bandwidth is not None and not (0 < bandwidth < math.inf):
            raise UsageError(
                f"network {self.name!r}: bandwidth_gb_per_s must be positive, or None for a free "
                f"network, got {bandwidth}"
            )
        if not 0 <= self.latency_us < math.inf:
            raise UsageError(
                f"network {self.name!r}: latency_us must be 0 or more, got {self.latency_us}"
            )

    @property
    def is_free(self) -> bool:
        """Whether nothing takes any time."""
        return self.bandwidth_gb_per_s is None and self.latency_us == 0

    def duration_us(self, kind: Kind, num_bytes: int, num_ranks: int) -> float:
        """How long a collective over `num_bytes` (the whole buffer) takes on `num_ranks`."""
        if num_ranks == 1:
            return 0.0
        if self.bandwidth_gb_per_s is None:
            return self.latency_us
        share = (num_ranks - 1) / num_ranks
        times = _PIECEWISE.get(kind, 0.0) * share + _WHOLE.get(kind, 0.0)
        return self.latency_us + times * num_bytes / self.bandwidth_gb_per_s * 1e-3


FREE = Network("free", None, 0.0)
NVLINK = Network("nvlink", 370.0, 20.0)
INFINIBAND = Network("infiniband", 45.0, 60.0)
