"""Rank 0 of N on a modelled network, in one process.

    group = init_modelled(1024, NVLINK)
    ...  # anything that uses torch.distributed: FSDP1, FSDP2, DDP, shoal
    group.traffic.num_bytes

The default process group claims N ranks. A collective costs a constant of host time whatever N
is, writes what the other ranks would send (`imagined_ranks`), and occupies this rank's link for
latency + bytes / bandwidth (`network`, `link`). So a step of a job on 1024 devices can be timed,
and its memory seen, on one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.calls import Call, Pair, Reduction, as_slots, as_tensor
from shoal.comm.collectives import Kind
from shoal.comm.imagined_ranks import KeptGathers, receive, reduction_of
from shoal.comm.link import CpuLink, CudaLink, CudaWire, device_of
from shoal.comm.network import FREE, INFINIBAND, NVLINK, Network
from shoal.comm.python_group import PythonGroup, PythonWork
from shoal.errors import UsageError

__all__ = [
    "BACKEND",
    "FREE",
    "INFINIBAND",
    "NVLINK",
    "Count",
    "Kind",
    "ModelledGroup",
    "Network",
    "Traffic",
    "init_modelled",
]

BACKEND = "shoal-modelled"


SAMPLE_NUMEL = 4096
"""How much of each gather `sample_gathers` looks at, at most."""


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


_Counters = dict[Kind, list[int]]
"""Of each kind, how many collectives and how many bytes so far."""


@dataclass(slots=True, kw_only=True)
class _Job:
    """What all groups of one modelled job have in common."""

    network: Network
    device: torch.device
    counters: _Counters = field(default_factory=dict)
    cpu_link: CpuLink = field(default_factory=CpuLink)
    wires: dict[torch.device, CudaWire] = field(default_factory=dict)
    kept: KeptGathers | None = None
    """While gathers keep what was written before."""
    samples: list[Tensor] | None = None
    """While gathers are sampled."""

    def link_on(self, device: torch.device) -> CpuLink | CudaLink:
        """A group's way onto the one link of this rank."""
        if device.type != "cuda":
            return self.cpu_link
        wire = self.wires.get(device)
        if wire is None:
            wire = self.wires[device] = CudaWire(device, self.network.is_free)
        return CudaLink(device, wire)


class ModelledGroup(PythonGroup):
    """A process group in which this process is one rank, and the others are imagined.

    All groups of a job share this rank's link, as communicators share the wires of a device: what
    they launch is carried one after the other.
    """

    backend_name = BACKEND
    others_are_imagined = True

    def __init__(self, rank: int, size: int, job: _Job) -> None:
        super().__init__(rank, size)
        self.job = job
        self._is_free = job.network.is_free
        self._own_counters: _Counters = {}
        self._links: dict[torch.device, CpuLink | CudaLink] = {}
        self._link_on(job.device)  # compiles its kernel now, not in a measured step

    @property
    def network(self) -> Network:
        """What the group's collectives are timed by."""
        return self.job.network

    @property
    def traffic(self) -> Traffic:
        """The collectives so far: of this group, or of all groups if it is the default one."""
        counts = {
            kind: Count(num_collectives=num_collectives, num_bytes=num_bytes)
            for kind, (num_collectives, num_bytes) in self._counters.items()
        }
        return Traffic(by_kind=MappingProxyType(counts))

    def reset_traffic(self) -> None:
        """Count from zero again."""
        self._counters.clear()

    @property
    def _counters(self) -> _Counters:
        return self.job.counters if self is dist.group.WORLD else self._own_counters

    def keep_gathers(self) -> None:
        """Write to no gather's memory but once, so that timed streams run no kernel for it.

        On CUDA, for all groups of the job. Called again, all memory is written once more.
        """
        if self.job.kept is not None:
            self.job.kept.forget()
        elif self.job.device.type == "cuda":
            self.job.kept = KeptGathers(self.job.device)

    @property
    def keeps_all_gathers(self) -> bool:
        """Whether no gather had to be written since `keep_gathers`, but to fill its memory once."""
        return self.job.kept is not None and self.job.kept.num_refused == 0

    def write_gathers(self) -> None:
        """Write all pieces in every gather, as at first."""
        self.job.kept = None

    def sample_gathers(self, step: Callable[[], object]) -> list[Tensor]:
        """Values of every gather of a step, as its readers find them: one small tensor for each."""
        samples: list[Tensor] = []
        self.job.samples = samples
        try:
            step()
        finally:
            self.job.samples = None
        if self.job.device.type == "cuda":
            torch.cuda.synchronize(self.job.device)
        return samples

    def run(self, calls: Sequence[Call], asynchronous: bool) -> PythonWork:
        """Count, write what comes to this rank, and occupy the link."""
        kind = calls[0].kind
        num_bytes = 0
        for call in calls:
            num_bytes += call.num_bytes
        self._count(kind, num_bytes)

        def move() -> None:
            for call in calls:
                self._deliver(call)

        link = self._link_on(device_of(calls) or self.job.device)
        duration_us = self.job.network.duration_us(kind, num_bytes, self._size)
        return link.launch(calls, move, duration_us, asynchronous)

    def gather_in_stream(self, pairs: Sequence[Pair]) -> Callable[[], object]:
        """A function that gathers in order with the current stream, any number of times."""
        num_bytes, job = sum(output.nbytes for output, _ in pairs), self.job
        known = [(self._gather(*pair), pair[0].view(-1)) for pair in pairs]
        link = self._link_on(pairs[0][0].device)
        duration_us = job.network.duration_us(Kind.ALL_GATHER, num_bytes, self._size)

        def move() -> None:
            # Most often in timed steps there is nothing to do, and the host should not pay for it.
            for call, flat in known:
                if job.kept is None or job.samples is not None or not job.kept.holds(flat):
                    self._deliver(call)

        def gather() -> None:
            self._count(Kind.ALL_GATHER, num_bytes)
            link.carry(move, duration_us)

        return gather

    def reduce_scatter_in_stream(self, op: Reduction) -> Callable[[Sequence[Pair]], None]:
        """A function of outputs and inputs that reduces in order with the current stream."""
        reduce, rank, size = reduction_of(op), self._rank, self._size

        def scatter(pairs: Sequence[Pair]) -> None:
            num_bytes = sum(input.nbytes for _, input in pairs)
            self._count(Kind.REDUCE_SCATTER, num_bytes)

            def move() -> None:
                for output, input in pairs:
                    numel = output.numel()
                    reduce(output, input[rank * numel : (rank + 1) * numel], size, op)

            duration_us = self.job.network.duration_us(Kind.REDUCE_SCATTER, num_bytes, size)
            self._link_on(pairs[0][0].device).carry(move, duration_us)

        return scatter

    def _deliver(self, call: Call) -> None:
        """Write what a call brings to this rank, where it is not there already."""
        job = self.job
        if call.kind is not Kind.ALL_GATHER:
            receive(call, self._rank, self._size)
            return
        piece, slots = as_tensor(call.input), as_slots(call.output)
        if job.kept is None or not job.kept.deliver(slots, piece, self._rank):
            receive(call, self._rank, self._size)
        if job.samples is not None and slots.flat is not None:
            job.samples.append(_sample(slots.flat))

    def _count(self, kind: Kind, num_bytes: int) -> None:
        for counters in (self._own_counters, self.job.counters):
            counts = counters.setdefault(kind, [0, 0])
            counts[0] += 1
            counts[1] += num_bytes

    def _link_on(self, device: torch.device) -> CpuLink | CudaLink:
        link = self._links.get(device)
        if link is None:
            link = self._links[device] = self.job.link_on(device)
        return link


def init_modelled(
    world_size: int,
    network: Network = FREE,
    device_type: str | None = None,
) -> ModelledGroup:
    """Make the default process group: rank 0 of `world_size` on `network`.

    `device_type` is where barriers are, and whose link is made ready: CUDA if there is one.
    """
    if world_size < 1:
        raise UsageError(f"world_size must be at least 1, got {world_size}")
    if dist.is_initialized():
        raise UsageError(
            "torch.distributed has a default process group already: call "
            "torch.distributed.destroy_process_group() first"
        )
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    if device_type not in ("cpu", "cuda"):
        raise UsageError(f"device_type must be 'cpu' or 'cuda', got {device_type!r}")
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    job = _Job(network=network, device=device)
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make_group, True, ["cpu", "cuda"])
    # No other rank will ever write to it: a wait for another rank's key should fail soon.
    store, timeout = dist.HashStore(), timedelta(seconds=5)
    store.set_timeout(timeout)
    dist.init_process_group(
        BACKEND, rank=0, world_size=world_size, store=store, timeout=timeout, pg_options=job
    )
    group = dist.group.WORLD
    assert isinstance(group, ModelledGroup)
    return group


def _sample(values: Tensor) -> Tensor:
    if values.numel() <= SAMPLE_NUMEL:
        return values.clone()
    # At random: pieces repeat, and regular steps could always meet the same part of them.
    generator = torch.Generator(values.device).manual_seed(0)
    shape = (SAMPLE_NUMEL,)
    chosen = torch.randint(values.numel(), shape, generator=generator, device=values.device)
    return values[chosen]


def _make_group(options: Any, job: _Job | None) -> ModelledGroup:
    if job is None:
        world = dist.group.WORLD
        if not isinstance(world, ModelledGroup):
            raise UsageError(f"backend {BACKEND!r} is made by init_modelled, not by its name")
        job = world.job
    return ModelledGroup(options.group_rank, options.group_size, job)
