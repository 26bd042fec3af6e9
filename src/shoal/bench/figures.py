"""What is measured about a run: raw samples, and the few figures that stand for them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum

from shoal.bench.cases import DeviceType


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The peak over some steps: of the CUDA allocator on CUDA, of the process on CPU."""

    allocated_gib: float | None
    """Held by tensors. CUDA only."""
    reserved_gib: float | None
    """Held by the caching allocator. CUDA only."""
    resident_gib: float | None
    """Resident set of the process. CPU only."""

    def __post_init__(self) -> None:
        if (self.allocated_gib is None) != (self.reserved_gib is None):
            raise ValueError(f"allocated and reserved memory come together, got {self}")

    @classmethod
    def largest(cls, of: Iterable[Memory]) -> Memory:
        """The largest of each kind, over ranks or rounds."""
        peaks = [asdict(peak) for peak in of]
        names = [field.name for field in fields(cls)]
        known = {name: [p[name] for p in peaks if p[name] is not None] for name in names}
        return cls(**{name: max(values, default=None) for name, values in known.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """What one forward+backward communicates."""

    num_calls: int
    num_bytes: int


class Gathers(StrEnum):
    """How a modelled network delivers, in timed steps, what other ranks would send."""

    KEPT = "kept"
    """It was written before, and is kept: no kernel runs for it."""
    WRITTEN = "written"
    """By kernels in every gather. They take time that a real rank does not spend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What is known about a run before it is timed."""

    num_parameters: int
    collectives: Collectives | None
    """None for an engine that does not communicate."""
    gathers: Gathers | None = None
    """None where real ranks send, or nobody does."""
    memory: Memory
    """Over forward+backward steps in a row, before the optimizer has any state."""
    training_memory: Memory
    """Over whole training steps, so with the optimizer's state in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeRound:
    """One round of forward+backward steps; each tuple has one entry per step."""

    forward_backward_ms: tuple[float, ...]
    """CUDA: between events around steps that follow each other without synchronising, as in
    training. CPU: `wall_ms`."""
    wall_ms: tuple[float, ...]
    """From an idle device until it is idle again."""
    host_ms: tuple[float, ...]
    """From an idle device until Python has the control back. CUDA only: on CPU it is `wall_ms`."""
    forward_ms: tuple[float, ...] = ()
    """CUDA: of the same steps as `forward_backward_ms`, until the last kernel of forward is over.
    Empty on CPU, and in older files."""
    probe_ms: float | None = None
    """What a little fixed Python took on the chosen core before the round: the host's speed then.
    CUDA only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRound:
    """One round of whole training steps."""

    optimizer_ms: tuple[float, ...]
    """The optimizer's step alone, from an idle device until it is idle again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures(Built):
    """The result of a run: what the table shows."""

    forward_backward_ms: float
    wall_ms: float
    host_ms: float | None
    optimizer_ms: float

    @property
    def device_type(self) -> DeviceType:
        """Where it was measured, as the memory tells."""
        return "cpu" if self.memory.allocated_gib is None else "cuda"


def of_round(device_type: DeviceType, samples: Sequence[float]) -> float:
    """What stands for the steps of one round: the median on CUDA, the minimum on CPU."""
    return float(min(samples) if device_type == "cpu" else statistics.median(samples))


def summarise(
    device_type: DeviceType,
    built: Built,
    compute: list[ComputeRound],
    optimizer: list[OptimizerRound],
) -> Figures:
    """Take for each figure the round in which it was the smallest (`of_round`).

    What else a machine does only ever makes a step slower, and comes and goes in seconds.
    """

    def over(rounds: Iterable[tuple[float, ...]]) -> float | None:
        return min((of_round(device_type, one) for one in rounds if one), default=None)

    def known(value: float | None, name: str) -> float:
        if value is None:
            raise ValueError(f"a run without a single sample of {name} has no figures")
        return value

    return Figures(
        **{field.name: getattr(built, field.name) for field in fields(built)},
        forward_backward_ms=known(
            over(one.forward_backward_ms for one in compute), "forward_backward_ms"
        ),
        wall_ms=known(over(one.wall_ms for one in compute), "wall_ms"),
        host_ms=over(one.host_ms for one in compute),
        optimizer_ms=known(over(one.optimizer_ms for one in optimizer), "optimizer_ms"),
    )
