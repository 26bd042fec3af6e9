"""Look at the shards of other ranks through RPC.

torchrun --nproc-per-node 2 remote.py
"""

import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
from readings import Results, described, launch, places
from torch.distributed import rpc
from torch.distributed._shard.sharded_tensor import rand
from torch.distributed._shard.sharding_spec import ChunkShardingSpec


def start_workers() -> None:
    """RPC between all ranks, which meet in a file."""
    place: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(place)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using a Backend")
        rpc.init_rpc(
            f"worker{dist.get_rank()}",
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
                init_method=f"file://{place[0]}/workers"
            ),
        )


def main() -> Results:
    start_workers()
    torch.manual_seed(dist.get_rank())
    tensor = rand(ChunkShardingSpec(dim=0, placements=places()), 7, 3, init_rrefs=True)
    dist.barrier()  # torch tells the others of shards before it fills them
    found: Results = {"tensor": described(tensor), "remote": {}}
    for rank, references in tensor.remote_shards().items():
        shards = [reference.to_here() for reference in references]
        found["remote"][f"rank {rank}"] = [
            [list(shard.metadata.shard_offsets), shard.tensor.tolist()] for shard in shards
        ]
    dist.barrier()
    alone = rand(ChunkShardingSpec(dim=0, placements=places()), 4)
    try:
        alone.remote_shards()
    except RuntimeError as error:
        found["without"] = type(error).__name__
    dist.barrier()
    rpc.shutdown()
    return found


if __name__ == "__main__":
    launch(main)
