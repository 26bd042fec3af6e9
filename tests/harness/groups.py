"""A rank's process groups: joined, watched for what tests leave behind, renewed."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import debug

from harness.messages import GroupState, Seat
from shoal._torch import groups

TIMEOUT = timedelta(minutes=10)
"""Longer than any test: the pool's own timeout must strike first, since it shows the stacks."""


class Groups:
    """The default process group of one rank, with the means to tell whether a test disturbed it."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._store = dist.TCPStore(
            "127.0.0.1", seat.store_port, is_master=False, wait_for_workers=False
        )
        # Two would corrupt the heap once in many thousand collectives, in whichever test is next.
        groups.run_gloo_in_one_thread()
        self._join(seat.prefix, binds=seat.setup.uses_cuda)

    def _join(self, prefix: str, *, binds: bool) -> None:
        setup = self._seat.setup
        dist.init_process_group(
            setup.backend,
            store=dist.PrefixStore(prefix, self._store),
            rank=self._seat.rank,
            world_size=self._seat.world_size,
            timeout=TIMEOUT,
            # Binding the device connects NCCL now, and tells barriers which GPU to use.
            device_id=torch.device(setup.device) if binds else None,
        )
        self._default = c10d._get_default_group()
        self._count = c10d._world.group_count

    def renew(self, prefix: str) -> None:
        """Leave every group, forget what was cached about them, and meet the others again."""
        if dist.is_initialized():
            dist.destroy_process_group()
        _forget_meshes()
        # Unbound, or meshes would split this group: torch 2.11 crashes in that (SIGSEGV in NCCL's
        # split, without shoal too) once a bound group was destroyed in the process.
        self._join(prefix, binds=False)

    def state(self) -> GroupState:
        """Look at what the run left."""
        if not dist.is_initialized():
            return GroupState(sequence=-1, disturbed=True)
        default = c10d._get_default_group()
        return GroupState(
            sequence=default._get_sequence_number_for_group(),  # pyright: ignore[reportAttributeAccessIssue]
            disturbed=default is not self._default
            or c10d._world.group_count != self._count
            or set(c10d._world.pg_map) != {default},
        )


def _forget_meshes() -> None:
    """Drop DTensor's sharding caches: they hold meshes whose groups are gone."""
    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()
