"""Turn rows into columns, deal them out in another order, and come back.

torchrun --nproc-per-node 4 resharding.py
"""

import copy

import torch
import torch.distributed as dist
from readings import Results, described, gathered, launch, places
from torch.distributed._shard.sharded_tensor import rand
from torch.distributed._shard.sharding_spec import ChunkShardingSpec


def main() -> Results:
    rows = ChunkShardingSpec(dim=0, placements=places())
    columns = ChunkShardingSpec(dim=1, placements=places())
    shuffled = ChunkShardingSpec(dim=0, placements=[places()[rank] for rank in (1, 0, 3, 2)])
    torch.manual_seed(dist.get_rank())
    tensor = rand(rows, 8, 12)
    original = copy.deepcopy(tensor)

    found: Results = {"before": gathered(tensor)}
    for name, spec in (("columns", columns), ("shuffled", shuffled), ("rows", rows)):
        same = tensor.reshard(spec)
        assert same is tensor
        found[name] = described(tensor)
        found[f"{name}_whole"] = gathered(tensor)
    assert torch.equal(tensor.local_tensor(), original.local_tensor())
    assert tensor.sharding_spec() == rows
    return found


if __name__ == "__main__":
    launch(main)
