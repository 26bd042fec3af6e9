"""A generation: the process groups of those who are alive, and the end of them.

Every regrouping makes a new generation, with group names that none had before: whoever holds a
group or a mesh of an older one gets an error, not another group.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal._torch import distributed_tensor, meshes
from shoal._torch import groups as torch_groups
from shoal.comm.transport import Transport
from shoal.errors import RankError
from shoal.mesh import FSDPMeshInfo
from shoal.survive.sockets import Connections


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Where the launcher's store listens."""

    host: str
    port: int
    prefix: str
    """Of the keys of this start of the job."""

    def connect(self, timeout_s: float = 300.0) -> dist.PrefixStore:
        """A connection of one's own."""
        store = dist.TCPStore(
            self.host,
            self.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
        return dist.PrefixStore(self.prefix, store)


_NAMES_PER_GENERATION = 1000


class Generation:
    """The groups of one generation, from `form` to `leave`; `cut` ends whatever waits in them."""

    def __init__(self, number: int, members: tuple[int, ...], member: int) -> None:
        self.number = number
        self.members = members
        self.rank = members.index(member)
        self._connections = Connections()
        self._groups: list[dist.ProcessGroup] = []
        self._lock = threading.Lock()
        self._is_over = False
        self.is_cut = False
        self.mesh: DeviceMesh
        self.info: FSDPMeshInfo
        self.parity: Transport

    def form(
        self, address: StoreAddress, backend: str | None, device_type: str, names: tuple[str, ...]
    ) -> None:
        """Make the groups; every member of the generation does. Raises if one died meanwhile."""
        torch_groups.count_groups_from(self.number * _NAMES_PER_GENERATION)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"generation/{self.number}", address.connect()),
            rank=self.rank,
            world_size=len(self.members),
        )
        own = dist.new_group(group_desc="parity")
        assert isinstance(own, dist.ProcessGroup)
        self.parity = Transport(own)
        world = dist.group.WORLD
        assert world is not None
        with self._lock:
            self._groups = [world, own]
        self.mesh = init_device_mesh(
            device_type, (len(self.members),), mesh_dim_names=names or None
        )
        meshes.set_apart(self.mesh, self.number)
        self.info = FSDPMeshInfo(self.mesh, 0)
        dist.barrier()  # connections are made when they are first used, on some backends
        on_device = torch.zeros(1, device=device_type)
        for group in (world, own):
            dist.all_reduce(on_device, group=group)
        synchronise(on_device.device)
        with self._lock:
            self._connections.seal()

    def check(self) -> None:
        """Raise if this generation was cut: what its collectives have left since is garbage.

        Ask after the host has waited for them: NCCL raises nothing where an abort ended one.
        """
        if self.is_cut:
            raise RankError(f"a rank of generation {self.number} is gone")

    def cut(self) -> None:
        """End everything that waits in these groups, from any thread; nothing once it is left."""
        with self._lock:
            if self._is_over:
                return
            self.is_cut = True
            self._connections.cut()
            while self._groups:
                with suppress(RuntimeError):
                    torch_groups.abort(self._groups.pop())

    def leave(self) -> None:
        """Destroy the groups."""
        with self._lock:
            self._is_over = True
            self._groups.clear()
        leave_groups()


def leave_groups() -> None:
    """Destroy all process groups of this process; none of the other ranks is waited for."""
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()
    distributed_tensor.forget_placements()


def synchronise(device: torch.device) -> None:
    """Wait for a device, which may run on over collectives that were aborted."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
