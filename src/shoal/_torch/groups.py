"""Process groups, with the stores they were made with."""

from __future__ import annotations

import os
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import rpc


def run_gloo_in_one_thread() -> None:
    """Give every gloo group that torch makes from now on one worker thread.

    torch gives it two, and when both end a collective at the same moment they write the name of
    the last one to the same string. Where one of the names is long (a coalesced all-gather has
    one) that is a write to freed memory, and the process dies of a corrupt heap, up to torch 2.13
    at least. Who owns the process calls this before it makes groups: a trainer, a test. It is not
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


Future: type = torch._C.Future
"""What c10d's works and `then` give; `torch.futures.Future` is a class below it."""


def rpc_is_running() -> bool:
    """Whether this process has called `init_rpc`."""
    return rpc.api._is_current_rpc_agent_set()


def rpc_gather(value: object) -> dict[int, Any]:
    """Give every RPC worker what each of them has, by the worker's id."""
    ids = {worker.name: worker.id for worker in rpc.api._get_current_rpc_agent().get_worker_infos()}
    gathered = cast(dict[str, Any], rpc.api._all_gather(value))
    return {ids[name]: found for name, found in gathered.items()}
