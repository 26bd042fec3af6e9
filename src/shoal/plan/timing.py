"""Notes played on lanes: when each stream gets to what, and what it waits for.

host       launches one operator after the other
streams    compute, gather, reduce: each in its own order, never before the launch
link       carries collectives of all groups, one after the other
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.comm.network import Network
from shoal.plan import notes
from shoal.plan.accelerators import Accelerator
from shoal.plan.notes import COMPUTE, Note


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Compute waited for a lane."""

    moment: str
    duration_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeForecast:
    """The time of one step."""

    step_ms: float
    forward_backward_ms: float
    host_ms: float
    compute_ms: float
    """The sum of the kernels on compute's stream."""
    link_ms: float
    """The sum of the collectives."""
    exposed_ms: float
    """What compute waited for lanes."""
    waits: tuple[Waiting, ...]
    """The longest of these, longest first."""


class Lanes:
    """The streams of one device."""

    def __init__(self, accelerator: Accelerator, network: Network) -> None:
        self._accelerator, self._network = accelerator, network
        self._streams: dict[int, float] = {}
        self._marks: dict[int, float] = {}
        self._host = self._link = self._compute = self._carried = self._exposed = 0.0
        self._host_began = 0.0
        self._waits: list[Waiting] = []
        self._moment = ""
        self.moments: list[tuple[str, float]] = []
        """When the host came to moments without a unit: the time until all before is done."""

    def play(self, taken: Sequence[Note]) -> None:
        """Run what was noted."""
        streams = self._streams
        for note in taken:
            match note:
                case notes.Kernel(_, flops, num_bytes, stream, dtype, _):
                    self._host += self._accelerator.host_us
                    took = self._accelerator.kernel_time_us(flops, num_bytes, dtype)
                    streams[stream] = max(streams.get(stream, 0.0), self._host) + took
                    self._compute += took if stream == COMPUTE else 0.0
                case notes.Collective(kind, num_bytes, num_ranks, stream):
                    self._host += self._accelerator.host_us
                    start = max(streams.get(stream, 0.0), self._host, self._link)
                    took = self._network.duration_us(kind, num_bytes, num_ranks)
                    self._link = streams[stream] = start + took
                    self._carried += took
                case notes.Mark(mark, stream):
                    self._marks[mark] = streams.get(stream, 0.0)
                case notes.Wait(mark, stream):
                    before, until = streams.get(stream, 0.0), self._marks.get(mark, 0.0)
                    if stream == COMPUTE and until > max(before, self._host):
                        waited = until - max(before, self._host)
                        self._exposed += waited
                        self._waits.append(Waiting(moment=self._moment, duration_us=waited))
                    streams[stream] = max(before, until)
                case notes.Moment(name, unit):
                    self._moment = f"{name} {unit}".strip()
                    if not unit:
                        self.moments.append((name, max(self._host, streams.get(COMPUTE, 0.0))))
                case _:
                    pass

    def forget_sums(self) -> None:
        """Let sums and waits begin anew; clocks go on."""
        self._host_began = self._host
        self._compute = self._carried = self._exposed = 0.0
        self._waits.clear()
        self.moments.clear()

    def forecast(self, *, begin: str, computed: str, end: str) -> TimeForecast:
        """The time between moments."""
        at = dict(self.moments)
        longest = sorted(self._waits, key=lambda one: -one.duration_us)[:10]
        return TimeForecast(
            step_ms=(at[end] - at[begin]) / 1e3,
            forward_backward_ms=(at[computed] - at[begin]) / 1e3,
            host_ms=(self._host - self._host_began) / 1e3,
            compute_ms=self._compute / 1e3,
            link_ms=self._carried / 1e3,
            exposed_ms=self._exposed / 1e3,
            waits=tuple(longest),
        )
