"""Rank 0 of N on a modelled network, in one process.

    group = init_modelled(1024, NVLINK)
    ...  # anything that uses torch.distributed: FSDP1, FSDP2, DDP, shoal
    group.traffic.num_bytes

The default process group claims N ranks. A collective costs a constant of host time whatever N
is, moves this rank's bytes (`clones`), and occupies the link for latency + bytes / bandwidth
(`network`, `link`). So a step of a job on 1024 devices can be timed, and its memory seen, on one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.calls import Call, Kind, Reduction, Slots
from shoal.comm.clones import among_clones, is_slot, reduction_of
from shoal.comm.link import CpuLink, CudaLink, device_of
from shoal.comm.network import FREE, INFINIBAND, NVLINK, Network
from shoal.comm.python_group import PythonGroup, PythonWork
from shoal.comm.traffic import Count, Meter, Traffic
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """What all groups of one modelled job have in common."""

    network: Network
    device: torch.device
    fill: bool


class ModelledGroup(PythonGroup):
    """A process group in which this process is one rank, and the others are imagined.

    Each group has a link of its own, as each NCCL communicator has a stream of its own: groups do
    not slow each other down.
    """

    backend_name = BACKEND
    others_are_imagined = True

    def __init__(self, rank: int, size: int, model: _Model, job: ModelledGroup | None) -> None:
        super().__init__(rank, size)
        self.model = model
        self.meter = Meter()
        self._is_free = model.network.is_free
        self._job_meter = None if job is None else job.meter
        self._links: dict[torch.device, CpuLink | CudaLink] = {}
        self._link_on(model.device)  # calibrates the device's clock now, not in a measured step

    @property
    def network(self) -> Network:
        """What the group's collectives are timed by."""
        return self.model.network

    @property
    def traffic(self) -> Traffic:
        """The collectives so far: of this group, or of all groups if it is the default one."""
        return self.meter.read()

    def reset_traffic(self) -> None:
        """Count from zero again."""
        self.meter.reset()

    def run(self, calls: Sequence[Call], asynchronous: bool) -> PythonWork:
        """Count, move this rank's bytes, and occupy the link."""
        kind, size, fill = calls[0].kind, self._size, self.model.fill
        num_bytes = 0
        for call in calls:
            num_bytes += call.num_bytes
        self._count(kind, num_bytes)

        def move() -> None:
            for call in calls:
                among_clones(call, self._rank, size, fill)

        link = self._link_on(device_of(calls) or self.model.device)
        duration_us = self.model.network.duration_us(kind, num_bytes, size)
        return link.launch(calls, move, duration_us, asynchronous)

    def run_in_stream(self, call: Call) -> None:
        """Run a call in order with the current stream; the call can be given again."""
        if not self._is_free:
            super().run_in_stream(call)
            return
        # Nobody has to queue for a link that takes no time.
        self._count(call.kind, call.num_bytes)
        among_clones(call, self._rank, self._size, self.model.fill)

    def gather_in_stream(self, call: Call) -> Callable[[], object]:
        """What runs a gather in order with the current stream, any number of times."""
        assert isinstance(call.input, Tensor)
        assert isinstance(call.output, Slots)
        if self._is_free and not self.model.fill and is_slot(call.output, call.input, self._rank):
            # There is nothing to move, and nobody to wait for.
            return partial(self._count, call.kind, call.num_bytes)
        return super().gather_in_stream(call)

    def reduce_scatter_in_stream(self, op: Reduction) -> Callable[[Tensor, Tensor], None]:
        """What reduces a tensor into an output in order with the current stream."""
        if not self._is_free:
            return super().reduce_scatter_in_stream(op)
        reduce, rank, size = reduction_of(op), self._rank, self._size

        def scatter(output: Tensor, input: Tensor) -> None:
            self._count(Kind.REDUCE_SCATTER, input.nbytes)
            numel = output.numel()
            reduce(output, input[rank * numel : (rank + 1) * numel], size, op)

        return scatter

    def _count(self, kind: Kind, num_bytes: int) -> None:
        self.meter.count(kind, num_bytes)
        if self._job_meter is not None:
            self._job_meter.count(kind, num_bytes)

    def _link_on(self, device: torch.device) -> CpuLink | CudaLink:
        link = self._links.get(device)
        if link is None:
            is_free = self.model.network.is_free
            link = CudaLink(device, is_free) if device.type == "cuda" else CpuLink()
            self._links[device] = link
        return link


def init_modelled(
    world_size: int,
    network: Network = FREE,
    device_type: str | None = None,
    *,
    fill: bool = False,
) -> ModelledGroup:
    """Make the default process group: rank 0 of `world_size` on `network`.

    `device_type` is where barriers are, and which clock is calibrated: CUDA if there is one.
    `fill` writes every rank's piece of a gathered buffer, not this rank's only; see `clones`.
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
    model = _Model(network=network, device=device, fill=fill)
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make_group, True, ["cpu", "cuda"])
    # Nobody else will ever write to it: whoever waits for another rank's key should know soon.
    store, timeout = dist.HashStore(), timedelta(seconds=5)
    store.set_timeout(timeout)
    dist.init_process_group(
        BACKEND, rank=0, world_size=world_size, store=store, timeout=timeout, pg_options=model
    )
    group = dist.group.WORLD
    assert isinstance(group, ModelledGroup)
    return group


def _make_group(options: Any, model: _Model | None) -> ModelledGroup:
    job = None
    if model is None:
        job = dist.group.WORLD
        if not isinstance(job, ModelledGroup):
            raise UsageError(f"backend {BACKEND!r} is made by init_modelled, not by its name")
        model = job.model
    return ModelledGroup(options.group_rank, options.group_size, model, job)
