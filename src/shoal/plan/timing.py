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


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What a lane did from when to when."""

    lane: str
    name: str
    start_us: float
    duration_us: float
    num_bytes: int = 0


LINK = "link"
"""The lane of collectives, of whatever stream."""


def _lane(stream: int) -> str:
    return "compute" if stream == COMPUTE else f"stream {stream}"


@dataclass(frozen=True, slots=True)
class _Reached:
    """How far the lanes had come at a moment, and what they had done by then."""

    name: str
    at: float
    host: float
    compute: float
    link: float
    exposed: float

    def __sub__(self, other: _Reached) -> _Reached:
        return _Reached(
            self.name, *(getattr(self, name) - getattr(other, name) for name in _CLOCKS)
        )


_CLOCKS = ("at", "host", "compute", "link", "exposed")


class Lanes:
    """The streams of one device."""

    def __init__(self, accelerator: Accelerator, network: Network) -> None:
        self._accelerator, self._network = accelerator, network
        self._streams: dict[int, float] = {}
        self._marks: dict[int, float] = {}
        self._host = self._link = self._compute = self._carried = self._exposed = 0.0
        self._waits: list[Waiting] = []
        self._moment = ""
        self._reached: list[_Reached] = []
        """The moments without a unit: when all before was done."""
        self.spans: list[Span] | None = None
        """What every lane did, once this is a list."""
        self.clock: list[float] = []
        """For each note since the beginning, when compute was done with all before it."""

    def play(self, taken: Sequence[Note]) -> None:
        """Run what was noted."""
        streams, clock = self._streams, self.clock
        for note in taken:
            clock.append(max(self._host, streams.get(COMPUTE, 0.0)))
            match note:
                case notes.Kernel(kernel, flops, num_bytes, stream, dtype, _, took):
                    self._host += self._accelerator.host_us
                    if took is None:
                        took = self._accelerator.kernel_time_us(flops, num_bytes, dtype)
                    start = max(streams.get(stream, 0.0), self._host)
                    streams[stream] = start + took
                    self._saw(_lane(stream), kernel, start, took, num_bytes)
                    self._compute += took if stream == COMPUTE else 0.0
                case notes.Collective(kind, num_bytes, num_ranks, stream):
                    self._host += self._accelerator.host_us
                    start = max(streams.get(stream, 0.0), self._host, self._link)
                    took = self._network.duration_us(kind, num_bytes, num_ranks)
                    self._link = streams[stream] = start + took
                    self._carried += took
                    self._saw(LINK, f"{kind} of {num_ranks}", start, took, num_bytes)
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
                        self._reach(name)
                case _:
                    pass

    def _saw(
        self, lane: str, name: str, start_us: float, duration_us: float, num_bytes: int
    ) -> None:
        if self.spans is not None:
            self.spans.append(
                Span(
                    lane=lane,
                    name=name,
                    start_us=start_us,
                    duration_us=duration_us,
                    num_bytes=num_bytes,
                )
            )

    def _reach(self, name: str) -> None:
        at = max(self._host, self._streams.get(COMPUTE, 0.0))
        self._reached.append(
            _Reached(name, at, self._host, self._compute, self._carried, self._exposed)
        )

    def begin(self) -> None:
        """A forecast begins here; clocks go on."""
        self._waits.clear()
        self._reached.clear()
        self.clock.clear()

    def forecast(self, *, begin: str, computed: str, end: str, unseen: int) -> TimeForecast:
        """The time between moments, with so many more micro-batches like the last but one."""
        at = {one.name: one for one in self._reached}
        step, half = at[end] - at[begin], at[computed] - at[begin]
        batches = [one for one in self._reached if one.name == MICRO_BATCH]
        total = {name: getattr(step, name) for name in _CLOCKS}
        more = 0.0
        if unseen:
            one = batches[-1] - batches[-2]
            more = unseen * one.at
            total = {name: total[name] + unseen * getattr(one, name) for name in _CLOCKS}
        longest = sorted(self._waits, key=lambda one: -one.duration_us)[:10]
        return TimeForecast(
            step_ms=total["at"] / 1e3,
            forward_backward_ms=(half.at + more) / 1e3,
            host_ms=total["host"] / 1e3,
            compute_ms=total["compute"] / 1e3,
            link_ms=total["link"] / 1e3,
            exposed_ms=total["exposed"] / 1e3,
            waits=tuple(longest),
        )


MICRO_BATCH = "micro-batch"
"""The moment at which one begins."""
