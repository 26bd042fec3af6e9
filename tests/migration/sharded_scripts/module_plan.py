"""Shard a module's parameters one by one and by a plan, and run it.

torchrun --nproc-per-node 2 module_plan.py
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from readings import Results, described, launch, places
from torch import nn
from torch.distributed._shard.api import shard_module, shard_parameter
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_plan import ShardingPlan
from torch.distributed._shard.sharding_spec import ChunkShardingSpec


class Tables(nn.Module):
    """Two tables, of which a plan shards the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tall = nn.Embedding(9, 6)
        self.wide = nn.Embedding(9, 6)
        self.mix = nn.Linear(6, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.mix(self.tall(tokens) + self.wide(tokens))


def main() -> Results:
    rows = ChunkShardingSpec(dim=0, placements=places())
    columns = ChunkShardingSpec(dim=1, placements=places())
    layer = nn.Linear(5, 4)
    shard_parameter(layer, "weight", rows)
    assert isinstance(layer.weight, ShardedTensor)

    plain = Tables()
    for parameter in plain.parameters():
        dist.broadcast(parameter.data, 0)
    model = copy.deepcopy(plain)
    shard_module(model, ShardingPlan(plan={"tall.weight": rows, "wide.weight": columns}))
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(9, (3, 4))
    output = model(tokens)
    torch.testing.assert_close(output, plain(tokens))

    found: Results = {
        "weight": described(layer.weight),
        "names": [name for name, _ in model.named_parameters()],
        "tall": described(model.tall.weight),
        "wide": described(model.wide.weight),
        "output": output.tolist(),
    }
    wrong: dict[str, Any] = {"nothing.weight": rows, "tall.weight": "rows"}
    for name, how in wrong.items():
        try:
            shard_module(copy.deepcopy(plain), ShardingPlan(plan={name: how}))
        except (AttributeError, TypeError) as error:
            found[name] = type(error).__name__
    return found


if __name__ == "__main__":
    launch(main)
