"""Process groups: the stores they were made with, gloo's threads, ranks that are threads."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import rpc


def run_gloo_in_one_thread() -> None:
    """Give every gloo group that torch makes from now on one worker thread.

    torch gives it two, and when both end a collective at the same moment they write the name of
    the last one to the same string. Where one of the names is long (a coalesced all-gather has
    one) that is a write to freed memory, and the process dies of a corrupt heap, up to torch 2.13
    at least. The owner of the process (a trainer, a test) calls this before it makes groups. Not
    for hooks that wait for a collective in the callback of another, as PowerSGD's do.
    """
    if not dist.is_gloo_available() or _ONE_THREAD in vars(dist.ProcessGroupGloo):
        return
    gloo: Any = dist.ProcessGroupGloo
    make = gloo.__init__

    def make_with_one_thread(
        self: Any, store: dist.Store, rank: int, size: int, *args: Any, **kwargs: Any
    ) -> None:
        timeout = kwargs.pop("timeout", None)
        if args or kwargs:
            make(self, store, rank, size, *args, **kwargs)
            return
        options = gloo._Options()
        if timeout is not None:
            options._timeout = timeout
        options._threads = 1
        names = os.environ.get("GLOO_SOCKET_IFNAME", "")
        devices = [gloo.create_device(interface=name) for name in names.split(",") if name]
        options._devices = devices or [gloo.create_default_device()]
        make(self, store, rank, size, options)

    gloo.__init__ = make_with_one_thread
    setattr(gloo, _ONE_THREAD, True)


_ONE_THREAD = "_shoal_one_thread"


def allocating_backend(group: dist.ProcessGroup, device: torch.device) -> Any | None:
    """The backend of a group, if it can allocate memory that it communicates from."""
    try:
        backend = cast(Any, group)._get_backend(device)
        return backend if backend.supports_tensor_alloc(device) else None
    except (RuntimeError, AttributeError):
        return None


def count_groups_from(number: int) -> None:
    """Let the next process groups have numbers in their names that none had before.

    torch counts from zero again when the default group is destroyed: then a mesh of groups that are
    gone would silently resolve to new groups of the same names.
    """
    world = cast(Any, dist.distributed_c10d)._world
    world.group_count = max(world.group_count, number)


def group_count() -> int:
    """How many process groups were named since the default group was made."""
    return cast(Any, dist.distributed_c10d)._world.group_count


def abort(group: dist.ProcessGroup) -> None:
    """End the collectives of a group, from any thread; gloo has no such thing and ignores it."""
    for device in ("cuda",):
        try:
            backend = cast(Any, group)._get_backend(torch.device(device))
        except RuntimeError:
            continue
        if hasattr(backend, "_abort"):
            backend._abort()
        elif hasattr(backend, "abort"):
            backend.abort()


def default_store() -> dist.Store:
    """The key-value store that the default process group was made with."""
    return dist.distributed_c10d._get_default_store()


def separate_store() -> dist.Store:
    """The default store over a connection of its own, which a wait of others does not block."""
    return cast(Any, default_store()).clone()


def num_launched(group: dist.ProcessGroup) -> int | None:
    """How many collectives of a group this rank has launched, if its backend counts them."""
    try:
        return cast(Any, group)._get_sequence_number_for_group()
    except RuntimeError:
        return None


@cache
def pause_at_exit() -> None:
    """Have the interpreter wait a moment before it ends, for threads of gloo.

    A thread of gloo tells that a collective is done, and only then lets go of its tensors, for
    which it needs the interpreter (up to torch 2.13 at least). If that has begun to end, Python
    ends the thread, C++ takes that for a fault, and a process whose work is done aborts ("terminate
    called without an active exception"): one of sixty two-rank scripts on a busy machine, with
    torch alone as well. Groups that were destroyed may have their threads still, if a cycle of
    objects holds them.
    """
    atexit.register(time.sleep, 0.05)


def serves_host(group: dist.ProcessGroup) -> bool:
    """Whether a group communicates tensors of the host, through gloo."""
    try:
        return cast(Any, group)._get_backend(torch.device("cpu")).name() == "gloo"
    except RuntimeError:
        return False


Future: type = torch._C.Future
"""The futures of c10d's works and of `then`; `torch.futures.Future` is a class below it."""


def rpc_is_running() -> bool:
    """Whether this process has called `init_rpc`."""
    return rpc.api._is_current_rpc_agent_set()


def rpc_gather(value: object) -> dict[int, Any]:
    """Give every RPC worker what each of them has, by the worker's id."""
    ids = {worker.name: worker.id for worker in rpc.api._get_current_rpc_agent().get_worker_infos()}
    gathered = cast(dict[str, Any], rpc.api._all_gather(value))
    return {ids[name]: found for name, found in gathered.items()}


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
