"""Teach sharded tensors a function that they do not know.

torchrun --nproc-per-node 2 custom_op.py
"""

from typing import Any

import torch
import torch.distributed as dist
from readings import Results, described, launch, places
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    custom_sharded_op_impl,
    init_from_local_shards,
    rand,
)
from torch.distributed._shard.sharding_spec import ChunkShardingSpec


@custom_sharded_op_impl(torch.asin)
def sharded_asin(types: Any, args: Any, kwargs: Any, process_group: Any) -> ShardedTensor:
    """Every rank does its part, and a new tensor is put together from the parts."""
    (tensor,) = args
    shards = [Shard(torch.asin(shard.tensor), shard.metadata) for shard in tensor.local_shards()]
    return init_from_local_shards(shards, tensor.size(), process_group=process_group)


@custom_sharded_op_impl(torch.Tensor.trace)
def sharded_trace(types: Any, args: Any, kwargs: Any, process_group: Any) -> torch.Tensor:
    """Add up the parts of the diagonal."""
    (tensor,) = args
    total = torch.zeros(())
    for shard in tensor.local_shards():
        row, column = shard.metadata.shard_offsets
        total += shard.tensor.diagonal(row - column).sum()
    dist.all_reduce(total, group=process_group)
    return total


def main() -> Results:
    torch.manual_seed(dist.get_rank())
    tensor = rand(ChunkShardingSpec(dim=0, placements=places()), 5, 5)
    found: Results = {"asin": described(torch.asin(tensor)), "trace": tensor.trace().item()}
    try:
        custom_sharded_op_impl(torch.acos)(lambda types, args: None)
    except TypeError as error:
        found["signature"] = type(error).__name__
    return found


if __name__ == "__main__":
    launch(main)
