"""How gradients of a replicated module are averaged."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.comm.buckets import BUCKET_MIB, FIRST_BUCKET_MIB, Limits
from shoal.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What one call of `replicate` asks for."""

    bucket_cap_mb: float = BUCKET_MIB
    first_bucket_mb: float = FIRST_BUCKET_MIB
    broadcast_buffers: bool = True
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False

    def __post_init__(self) -> None:
        for name in ("bucket_cap_mb", "first_bucket_mb"):
            if getattr(self, name) <= 0:
                raise UsageError(
                    f"{name} must be a size in MiB above 0, got {getattr(self, name)}; a small "
                    "one gives every parameter a bucket of its own"
                )

    @property
    def limits(self) -> Limits:
        """At which size the first bucket is full, and each one after it."""
        return Limits.of_ddp(self.bucket_cap_mb, self.first_bucket_mb)

    @property
    def records_order(self) -> bool:
        """Whether buckets follow the order of the first backward, which must reach everything."""
        return self.static_graph or not self.find_unused_parameters
