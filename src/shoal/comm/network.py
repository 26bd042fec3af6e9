"""A network as two numbers, and how long a collective takes on it.

The modelled network, the benchmarks on it and the costs of graphs all ask `Network.duration_us`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.comm.collectives import Kind, bytes_sent
from shoal.errors import UsageError


@dataclass(frozen=True, slots=True)
class Network:
    """A link model: a collective takes latency + bytes over the link / bandwidth.

    The bytes are those of the table (`collectives.py`); the latency counts once.
    """

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

    @property
    def bytes_per_us(self) -> float:
        """The bandwidth in other units."""
        return math.inf if self.bandwidth_gb_per_s is None else self.bandwidth_gb_per_s * 1e3

    def duration_us(self, kind: Kind, num_bytes: int, num_ranks: int | None = None) -> float:
        """How long a collective over `num_bytes` (the whole buffer) takes on `num_ranks`.

        None stands for a number that is not known: as long as on very many.
        """
        if num_ranks == 1:
            return 0.0
        if self.bandwidth_gb_per_s is None:
            return self.latency_us
        return self.latency_us + bytes_sent(kind, num_bytes, num_ranks) / self.bytes_per_us


FREE = Network("free", None, 0.0)
NVLINK = Network("nvlink", 370.0, 20.0)
INFINIBAND = Network("infiniband", 45.0, 60.0)
