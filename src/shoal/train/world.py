"""The ranks of a run, and what they tell each other apart from gradients."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.errors import ShoalError, UsageError
from shoal.train import environment
from shoal.train.environment import Place

T = TypeVar("T")

_HEAD_START_S = 0.5


class SilentExit(SystemExit):
    """Ends a rank whose error another rank reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The process group of a run as one rank sees it."""

    place: Place
    device: torch.device
    mesh: DeviceMesh

    @property
    def rank(self) -> int:
        """This process's number among the ranks."""
        return self.place.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.place.world_size

    @property
    def leads(self) -> bool:
        """Whether this rank writes and speaks for all."""
        return self.rank == 0

    def gather(self, numbers: Sequence[float]) -> torch.Tensor:
        """Return every rank's numbers, one row per rank, on the CPU."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        rows = mine.new_empty(self.size, len(numbers))
        dist.all_gather(list(rows.unbind()), mine)
        return rows.cpu()

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        dist.barrier()

    def share(self, make: Callable[[], T]) -> T:
        """Let rank 0 make something and hand it to all; if that fails, only rank 0 says why."""
        message: list[object] = [None]
        failure: ShoalError | None = None
        if self.leads:
            try:
                message = [make()]
            except ShoalError as error:
                failure = error
                message = [SilentExit(2 if isinstance(error, UsageError) else 1)]
        dist.broadcast_object_list(message, src=0, device=self.device)
        if failure is not None:
            raise failure
        made = message[0]
        if isinstance(made, SilentExit):
            # torchrun ends all ranks when the first one leaves: rank 0 has to speak before.
            time.sleep(_HEAD_START_S)
            raise made
        return made  # pyright: ignore[reportReturnType]

    def agree(self, what: str, value: str) -> None:
        """Raise on every rank, naming the first that differs, unless all hold the same value."""
        values: list[str] = [""] * self.size
        dist.all_gather_object(values, value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise UsageError(
                    f"rank {rank} and rank 0 differ in {what}: {other} against {values[0]}. "
                    f"Every machine of a run needs the same files."
                )


@contextmanager
def join_world(place: Place, device_type: str) -> Iterator[World]:
    """Join the other ranks, and part from them at the end if all went well."""
    if device_type == "cuda":
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        device = torch.device("cpu")
        if place.local_world_size == place.world_size:
            _stay_local()
        dist.init_process_group("gloo")
    mesh = init_device_mesh(device_type, (place.world_size,), mesh_dim_names=("shard",))
    yield World(place=place, device=device, mesh=mesh)
    # Not in a `finally`: after an error the other ranks may be gone, and waiting for them hangs.
    dist.destroy_process_group()


def _stay_local() -> None:
    names = {name for _, name in socket.if_nameindex()}
    for loopback in ("lo", "lo0"):
        if loopback in names:
            environment.stay_on_loopback(loopback)
            return
