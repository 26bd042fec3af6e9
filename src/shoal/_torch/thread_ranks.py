"""Threads that are ranks of `torch.distributed`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist


class _WorldOfThisThread:
    """Stands in for c10d's module state: threads that asked for it have a state of their own."""

    def __init__(self, of_process: object) -> None:
        super().__setattr__("_of_process", of_process)
        super().__setattr__("_of_thread", threading.local())
        super().__setattr__("_threads", [])

    def begin_thread(self) -> None:
        self._threads.append(threading.current_thread())
        self._of_thread.world = SimpleNamespace(
            default_pg=None,
            pg_map={},
            pg_names={},
            pg_group_ranks={},
            pg_backend_config={},
            pg_config_info=[],
            group_count=0,
            tags_to_pg={},
            pg_to_tag={},
            pg_coalesce_state={},
            comms=[],
        )

    def is_in_use(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self._of_thread, "world", self._of_process), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(getattr(self._of_thread, "world", self._of_process), name, value)


@contextmanager
def ranks_as_threads() -> Iterator[Callable[[], None]]:
    """Let threads be ranks of `torch.distributed`; each calls the yielded function first."""
    c10d, c_api = cast(Any, dist.distributed_c10d), cast(Any, torch._C)._distributed_c10d
    process_world, hook = c10d._world, sys.excepthook
    c10d._world = world = _WorldOfThisThread(process_world)
    c_api._set_thread_isolation_mode(True)
    try:
        yield world.begin_thread
    finally:
        c_api._set_thread_isolation_mode(False)
        # A thread that is stuck must not find the groups of the process when it comes back.
        if not world.is_in_use():
            c10d._world = process_world
        sys.excepthook = hook  # init_process_group wraps it, once for each rank
