"""The pools that are alive in this process, and their end."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from harness.pool import Pool
from harness.setup import Setup

_pools: dict[tuple[int, Setup], Pool] = {}
_stores: list[dist.TCPStore] = []


@contextlib.contextmanager
def borrow_pool(world_size: int, setup: Setup, *, fresh: bool) -> Iterator[Pool]:
    """Lend a pool that is ready to run: the live one, a new one, or one for this use only."""
    if fresh:
        pool = _start_pool(world_size, setup)
        try:
            yield pool
        finally:
            pool.kill()
        return
    pool = _pools.get((world_size, setup))
    if pool is None or not pool.ready():
        if pool is not None:
            pool.kill()
        pool = _pools[world_size, setup] = _start_pool(world_size, setup)
    yield pool


def close_pools() -> None:
    """End every rank; a later use starts new ones."""
    while _pools:
        _pools.popitem()[1].kill()
    _stores.clear()


def _start_pool(world_size: int, setup: Setup) -> Pool:
    if not _stores:
        # Port 0 lets the kernel pick one that is free, with no moment for others to take it.
        _stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        atexit.register(close_pools)
    return Pool(world_size=world_size, setup=setup, store_port=_stores[0].port)
