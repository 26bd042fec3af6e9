"""The ranks of a run, and what they tell each other apart from gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from shoal._torch import groups
from shoal.comm.observer import waiting
from shoal.errors import ShoalError, UsageError
from shoal.train import environment
from shoal.train.environment import Place
from shoal.train.generation import fresh_store

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

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks that hold copies of this rank's shards, if there are replicas."""
        return self.mesh.get_group("replicate") if self.mesh.ndim > 1 else None

    def gather(self, numbers: Sequence[float]) -> torch.Tensor:
        """Return every rank's numbers, one row per rank, on the CPU."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        rows = mine.new_empty(self.size, len(numbers))
        with waiting("the numbers of all ranks"):
            dist.all_gather(list(rows.unbind()), mine)
            return rows.cpu()

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        with waiting("the barrier of all ranks"):
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
        with waiting(f"what all ranks say of {what}"):
            dist.all_gather_object(values, value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise UsageError(
                    f"rank {rank} and rank 0 differ in {what}: {other} against {values[0]}. "
                    f"Every machine of a run needs the same files."
                )


@contextmanager
def join_world(place: Place, device_type: str, *, replicas: int = 1) -> Iterator[World]:
    """Join the other ranks, and part from them at the end if all went well.

    More than one replica makes a mesh of two axes: weights are sharded along the second.
    """
    if place.local_world_size == place.world_size:
        environment.stay_on_loopback()
    if device_type == "cuda":
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
        _init("cpu:gloo,cuda:nccl", place, device)
    else:
        device = torch.device("cpu")
        _init("gloo", place, None)
    mesh = make_mesh(device_type, place.world_size, replicas)
    yield World(place=place, device=device, mesh=mesh)
    # Not in a `finally`: after an error the other ranks may be gone, and waiting for them hangs.
    dist.destroy_process_group()


def _init(backend: str, place: Place, device: torch.device | None) -> None:
    groups.run_gloo_in_one_thread()
    dist.init_process_group(
        backend,
        store=fresh_store(_store(), place.rank, place.world_size),
        rank=place.rank,
        world_size=place.world_size,
        device_id=device,
    )


def _store() -> dist.Store:
    """Where the ranks meet: a private file of our launcher, which opens no port, or torchrun's."""
    path = environment.store_file()
    if path is None:
        return next(rendezvous("env://"))[0]
    return dist.FileStore(str(path), -1)  # -1: whose folder it is removes it, not the last rank


def make_mesh(device_type: str, num_ranks: int, replicas: int) -> DeviceMesh:
    """Arrange the ranks as replicas of a sharded model."""
    if replicas == 1:
        return init_device_mesh(device_type, (num_ranks,), mesh_dim_names=("shard",))
    shape = (replicas, num_ranks // replicas)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))
