"""RRefs to the shards of other ranks: exchanged, counted from the world, and cleaned up."""

import pickle
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import rpc

from harness import ranks
from sharded_api import OURS, TORCHS, Api, compare, compare_errors, run
from shoal.doors.sharded_tensor.remote_shards import SHARED


@contextmanager
def workers(folder: Path, shift: int = 0) -> Iterator[None]:
    """RPC between all ranks; shifted, so that a worker's id is not its rank."""
    rank, world_size = (dist.get_rank() + shift) % dist.get_world_size(), dist.get_world_size()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/workers{shift}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using a Backend")
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    try:
        yield
    finally:
        rpc.shutdown()


def fetched(tensor: Any) -> list[tuple[int, list[Any]]]:
    """Every remote shard, brought here; RPC ends only after all ranks have done so."""
    found = []
    for worker, references in sorted(tensor.remote_shards().items()):
        assert all(reference.owner().id == worker for reference in references)
        shards = [reference.to_here() for reference in references]
        found.append((worker, [(shard.metadata, shard.tensor) for shard in shards]))
    dist.barrier()
    return found


@ranks(2, 4, fresh=True)
def test_remote_shards_are_torchs(tmp_path: Path, world_size: int) -> None:
    everyone, rank = [*range(world_size)], dist.get_rank()
    group = dist.new_group([world_size - 1])

    def script(api: Api) -> Any:
        names = api.spec.ChunkShardingSpec(0, [f"worker{r}/cpu" for r in everyone])
        tensors = [
            api.tensor.rand(api.chunks(0, everyone), 10, 3, init_rrefs=True),
            api.tensor.rand(api.chunks(1, everyone * 2), 2, 16, init_rrefs=True),
            api.tensor.ones(api.chunks(0, [1]), 4, init_rrefs=True),
            api.tensor.ones(names, 6, 2, init_rrefs=True),
            api.tensor.init_from_local_shards(
                [api.shard(torch.full((2,), 1.0 + rank), [2 * rank], rank)],
                2 * world_size,
                init_rrefs=True,
            ),
            api.tensor.ones(
                api.chunks(0, [world_size - 1]), 4, process_group=group, init_rrefs=True
            ),
        ]
        cast = tensors[0].to(torch.float64)
        loaded = pickle.loads(pickle.dumps(tensors[1]))
        return [fetched(tensor) for tensor in (*tensors, cast, loaded)]

    with workers(tmp_path):
        compare(script)
        wrong = "Invalid worker name"
        compare_errors(
            lambda api: api.tensor.ones(api.spec.ChunkShardingSpec(0, ["foreman/cpu"]), 4), wrong
        )
        dist.barrier()


@ranks(2, fresh=True)
def test_nothing_stays_of_a_tensor_that_is_gone(tmp_path: Path) -> None:
    with workers(tmp_path):
        kept = OURS.tensor.ones(OURS.chunks(0, [0, 1]), 4, init_rrefs=True)
        gone = OURS.tensor.ones(OURS.chunks(0, [0, 1]), 4, init_rrefs=True)
        alive = weakref.ref(gone)
        assert len(SHARED) == 2
        del gone
        assert alive() is None
        assert [reference() for reference in SHARED.values()] == [kept]
        assert len(kept.remote_shards()) == 1
        dist.barrier()
        del kept
        assert not SHARED
        assert OURS.tensor.api._sharded_tensor_map is SHARED


@ranks(2, fresh=True)
def test_others_see_a_tensor_once_it_is_filled(tmp_path: Path) -> None:
    def late(local: torch.Tensor) -> None:
        time.sleep(0.3 * (dist.get_rank() == 0))
        local.fill_(7)

    with workers(tmp_path), mock.patch.object(torch.Tensor, "uniform_", late):
        tensor = OURS.tensor.rand(OURS.chunks(0, [0, 1]), 4, init_rrefs=True)
        for references in tensor.remote_shards().values():
            for reference in references:
                assert reference.to_here().tensor.tolist() == [7, 7]
        dist.barrier()


@ranks(2, fresh=True)
def test_workers_are_counted_as_ranks_are(tmp_path: Path) -> None:
    with workers(tmp_path, shift=1):
        for api in (TORCHS, OURS):
            with pytest.raises(ValueError, match="Default ProcessGroup and RPC ranks must be the"):
                run(lambda api: api.tensor.ones(api.chunks(0, [0]), 4, init_rrefs=True), api)
        dist.barrier()
