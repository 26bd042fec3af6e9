"""The process group of a forecast: rank 0 of N, whose collectives are noted and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shoal.comm.calls import Call
from shoal.comm.python_group import PythonGroup, PythonWork
from shoal.errors import UsageError
from shoal.plan.device import NotingDevice

BACKEND = "shoal-imagined"


class _NotedWork(PythonWork):
    """A collective that is over."""

    def finish(self) -> None:
        """Nothing is on its way."""

    def is_completed(self) -> bool:
        """Always."""
        return True


class NotedGroup(PythonGroup):
    """Tells an imagined device what it is asked for."""

    backend_name = BACKEND
    others_are_imagined = True

    def __init__(self, rank: int, size: int, device: NotingDevice) -> None:
        super().__init__(rank, size)
        self.device = device

    def run(self, calls: Sequence[Call], asynchronous: bool) -> PythonWork:
        """Note the calls; nothing is sent, and results are whatever memory holds."""
        if self._size > 1 and any(call.num_bytes for call in calls):
            self.device.carried(calls, self._size)
        return _NotedWork(calls)


@contextmanager
def imagined_world(device: NotingDevice, world_size: int) -> Iterator[None]:
    """Be rank 0 of a job that is imagined, inside of the `with` block."""
    if dist.is_initialized():
        raise UsageError(
            "torch.distributed has a default process group already: forecast in a process of its "
            "own (`shoal plan`), or before init_process_group"
        )
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make_group, True, ["cpu", "cuda"])
    store, timeout = dist.HashStore(), timedelta(seconds=5)
    store.set_timeout(timeout)
    dist.init_process_group(
        BACKEND, rank=0, world_size=world_size, store=store, timeout=timeout, pg_options=device
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _make_group(options: Any, device: NotingDevice | None) -> NotedGroup:
    if device is None:
        world = dist.group.WORLD
        if not isinstance(world, NotedGroup):
            raise UsageError(f"backend {BACKEND!r} is made by shoal.plan, not by its name")
        device = world.device
    return NotedGroup(options.group_rank, options.group_size, device)
