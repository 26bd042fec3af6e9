"""Put tensors that ranks have into one, and gather it.

torchrun --nproc-per-node 2 local_shards.py
"""

import torch
import torch.distributed as dist
from readings import Results, described, gathered, launch
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardMetadata,
    init_from_local_shards,
)


def main() -> Results:
    rank = dist.get_rank()
    rows = torch.arange(6.0).view(3, 2) + 10 * rank
    shard = Shard.from_tensor_and_offsets(rows, shard_offsets=[3 * rank, 0], rank=rank)
    together = init_from_local_shards([shard], 6, 2)
    assert together.local_shards()[0].tensor is rows
    rows += 1  # it is the tensor's own memory

    ragged = [
        Shard(
            torch.full((width, 3), float(offset)),
            ShardMetadata([offset, 0], [width, 3], f"rank:{rank}/cpu"),
        )
        for offset, width in ([(0, 1), (5, 2)] if rank == 0 else [(1, 4)])
    ]
    uneven = init_from_local_shards(ragged, [7, 3])

    found: Results = {
        "together": described(together),
        "together_whole": gathered(together),
        "uneven": described(uneven),
        "uneven_whole": gathered(uneven),
    }
    out = torch.zeros(6, 2) if rank == 1 else None
    together.gather(dst=1, out=out)
    found["on_1"] = None if out is None else out.tolist()

    gap = Shard.from_tensor_and_offsets(torch.zeros(2), shard_offsets=[3 * rank], rank=rank)
    twice = Shard.from_tensor_and_offsets(torch.zeros(2), shard_offsets=[rank], rank=rank)
    for name, wrong, size in (("gap", gap, 5), ("twice", twice, 3), ("size", shard, 9)):
        try:
            init_from_local_shards([wrong], size)
        except ValueError as error:
            found[name] = type(error).__name__
    return found


if __name__ == "__main__":
    launch(main)
