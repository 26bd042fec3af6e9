"""Train a table whose rows lie on several ranks: each rank steps its own.

torchrun --nproc-per-node 2 training.py
"""

import torch
import torch.distributed as dist
from readings import Results, described, gathered, launch, places
from torch import nn
from torch.distributed._shard.sharded_tensor import rand
from torch.distributed._shard.sharding_spec import ChunkShardingSpec


def main() -> Results:
    torch.manual_seed(dist.get_rank())
    table = rand(ChunkShardingSpec(dim=0, placements=places()), 9, 4, requires_grad=True)
    nn.init.uniform_(table, -0.5, 0.5)
    own = table.local_tensor()
    assert own.requires_grad
    optimizer = torch.optim.AdamW([shard.tensor for shard in table.local_shards()], lr=0.1)

    losses = []
    for _ in range(4):
        loss = (table.local_tensor() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert table.local_tensor() is own
    return {"losses": losses, "table": described(table), "whole": gathered(table)}


if __name__ == "__main__":
    launch(main)
