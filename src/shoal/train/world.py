"""The ranks of a run: how they meet, and what they tell each other apart from gradients."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import DistStoreError, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from shoal._torch import groups
from shoal.comm.observer import waiting
from shoal.errors import RankError, ShoalError, UsageError
from shoal.train import environment
from shoal.train.environment import Place

T = TypeVar("T")

_HEAD_START_S = 0.5
MEETING_TIMEOUT = timedelta(minutes=5)
_POLL_S = 0.01


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

    def check_same(self, what: str, value: str) -> None:
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
    device, backend = torch.device("cpu"), "gloo"
    if device_type == "cuda":
        device, backend = torch.device("cuda", place.local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    groups.run_gloo_in_one_thread()
    dist.init_process_group(
        backend,
        store=fresh_store(_store(), place.rank, place.world_size),
        rank=place.rank,
        world_size=place.world_size,
        device_id=device if device_type == "cuda" else None,
    )
    mesh = make_mesh(device_type, place.world_size, replicas)
    yield World(place=place, device=device, mesh=mesh)
    # Not in a `finally`: after an error the other ranks may be gone, and waiting for them hangs.
    dist.destroy_process_group()


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


def fresh_store(store: Store, rank: int, world_size: int) -> Store:
    """Return a part of `store` that only the ranks of this start use; collective.

    torch's elastic agent keeps its store when it starts the ranks again, and gloo would find in it
    the addresses of ranks that are gone. The agents of several hosts do not count restarts alike,
    so the ranks agree on a name: every rank asks with a token of its own, rank 0 answers each such
    token, and waits until all have heard. Tokens of earlier starts are answered too, and nobody
    reads that.
    """
    token = secrets.token_hex(8)
    if rank == 0:
        _answer(store, token, world_size)
    else:
        store.set(f"shoal/ask/{rank}", token)
        try:
            store.wait([f"shoal/answer/{token}"], MEETING_TIMEOUT)
        except DistStoreError as error:
            raise RankError(f"rank {rank} heard nothing of rank 0 for {MEETING_TIMEOUT}") from error
        token = store.get(f"shoal/answer/{token}").decode()
        store.set(f"shoal/heard/{token}/{rank}", "")
    return PrefixStore(f"shoal/start/{token}", store)


def _answer(store: Store, name: str, world_size: int) -> None:
    """Tell every rank that asks the name of this start, until all have heard it."""
    deadline = time.monotonic() + MEETING_TIMEOUT.total_seconds()
    missing = set(range(1, world_size))
    while missing:
        for rank in tuple(missing):
            if store.check([f"shoal/heard/{name}/{rank}"]):
                missing.discard(rank)
            elif store.check([f"shoal/ask/{rank}"]):
                store.set(f"shoal/answer/{store.get(f'shoal/ask/{rank}').decode()}", name)
        if missing and time.monotonic() > deadline:
            ranks = ", ".join(map(str, sorted(missing)))
            raise RankError(f"rank 0 heard nothing of rank {ranks} for {MEETING_TIMEOUT}")
        time.sleep(_POLL_S if missing else 0)
