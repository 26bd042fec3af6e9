"""RRefs to the shards of other ranks, through torch's RPC, for tensors that ask for them.

share(tensor) on every rank ──▶ each worker sends RRefs of its shards to all the others
the tensor ends on a rank    ──▶ its number, and what others sent for it, go too
"""

from __future__ import annotations

import threading
import weakref
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import rpc

from shoal._torch import groups
from shoal._torch.sharded import LocalShard

if TYPE_CHECKING:
    from shoal.tensor.sharded import ShardedTensor

SHARED: dict[int, weakref.ref[ShardedTensor]] = {}
"""The tensors of this process that other workers can send RRefs for, by number."""

_received: dict[int, dict[int, list[Any]]] = {}
_number_of: dict[int, int] = {}
"""By the id of a tensor that is alive, its number."""

_numbers = count()
_lock = threading.Lock()


def share(tensor: ShardedTensor) -> None:
    """Exchange RRefs to all shards between all RPC workers: they all call it."""
    if not groups.rpc_is_running():
        raise RuntimeError(
            "RPC Framework needs to be initialized using torch.distributed.rpc.init_rpc if "
            "init_rrefs is set to True"
        )
    worker = rpc.get_worker_info().id
    if worker != dist.get_rank():
        raise ValueError(
            "Default ProcessGroup and RPC ranks must be the same for ShardedTensor, found process "
            f"group rank: {dist.get_rank()} and RPC rank: {worker}"
        )
    number = _enter(tensor)
    numbers = groups.rpc_gather(number)
    shards = tensor.local_shards()
    if shards:
        rrefs = [rpc.RRef(shard) for shard in shards]
        sent = [
            rpc.rpc_async(other, _receive, args=(its, rrefs, worker))
            for other, its in numbers.items()
            if other != worker
        ]
        torch.futures.wait_all(sent)
    # Nobody goes on before everybody has everything.
    groups.rpc_gather(None)


def is_shared(tensor: ShardedTensor) -> bool:
    """Whether RRefs to its shards were exchanged."""
    return id(tensor) in _number_of


def remote_shards(tensor: ShardedTensor) -> dict[int, list[rpc.RRef[LocalShard]]]:
    """RRefs to the shards of the other workers, by their ids."""
    if not is_shared(tensor):
        raise RuntimeError(
            "ShardedTensor created with init_rrefs=False, no RRefs to remote shards available; "
            "fetch(region) needs none"
        )
    return _received[_number_of[id(tensor)]]


def _enter(tensor: ShardedTensor) -> int:
    with _lock:
        number = next(_numbers)
        SHARED[number] = weakref.ref(tensor)
        _received[number] = {}
        _number_of[id(tensor)] = number
    weakref.finalize(tensor, _leave, number, id(tensor)).atexit = False
    return number


def _leave(number: int, identity: int) -> None:
    with _lock:
        del SHARED[number], _received[number], _number_of[identity]


def _receive(number: int, shards: list[Any], worker: int) -> None:
    with _lock:
        if number not in SHARED:
            raise RuntimeError(
                f"worker {worker} sent shards of tensor {number}, which is gone here: keep the "
                "ShardedTensor on all ranks until all have made theirs"
            )
        _received[number][worker] = shards
