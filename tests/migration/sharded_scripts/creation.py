"""Make tensors from specs: equal chunks, chunks in any order, shards of any size.

torchrun --nproc-per-node 2 creation.py
"""

import torch
import torch.distributed as dist
import torch.distributed._shard.sharded_tensor as sharded_tensor
from readings import Results, described, launch, places
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardMetadata,
)


def main() -> Results:
    rows = ChunkShardingSpec(dim=0, placements=places())
    columns = ChunkShardingSpec(dim=-1, placements=places()[::-1])
    dealt = ChunkShardingSpec(dim=0, placements=places() + places()[::-1])
    tiles = EnumerableShardingSpec(
        [
            ShardMetadata([0, 0], [1, 4], "rank:1/cpu"),
            ShardMetadata([1, 0], [2, 1], "rank:0/cpu"),
            ShardMetadata([1, 1], [2, 3], "rank:1/cpu"),
        ]
    )
    torch.manual_seed(dist.get_rank())
    tensors: dict[str, ShardedTensor] = {
        "zeros": sharded_tensor.zeros(rows, 5, 3),
        "ones": sharded_tensor.ones(columns, 2, 7, dtype=torch.int32),
        "full": sharded_tensor.full(tiles, (3, 4), 2.5, dtype=torch.float64),
        "rand": sharded_tensor.rand(dealt, 9, requires_grad=True),
        "randn": sharded_tensor.randn(tiles, 3, 4),
        "one_rank": sharded_tensor.ones(ChunkShardingSpec(0, places(1)), 4),
    }
    empty = sharded_tensor.empty(rows, 4, 2, dtype=torch.bool)
    for shard in empty.local_shards():
        shard.tensor.fill_(dist.get_rank() == 0)
    tensors["empty"] = empty
    tensors["double"] = tensors["randn"].to(torch.float64)

    found: Results = {name: described(tensor) for name, tensor in tensors.items()}
    try:
        sharded_tensor.zeros(rows, 4, 4, layout=torch.sparse_coo)
    except ValueError as error:
        found["refused"] = type(error).__name__
    try:
        tensors["rand"].local_tensor()
    except NotImplementedError as error:
        found["several"] = type(error).__name__
    return found


if __name__ == "__main__":
    launch(main)
