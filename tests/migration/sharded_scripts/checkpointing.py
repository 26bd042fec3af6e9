"""Sharded tensors in state dicts: saved by torch.distributed.checkpoint, loaded into another cut.

torchrun --nproc-per-node 2 checkpointing.py
"""

import io
import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from readings import Results, described, gathered, launch, places
from torch import nn
from torch.distributed._shard.api import load_with_process_group
from torch.distributed._shard.sharded_tensor import (
    pre_load_state_dict_hook,
    rand,
    state_dict_hook,
)
from torch.distributed._shard.sharding_spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardingSpec,
    ShardMetadata,
)


class Table(nn.Module):
    """A table that is an attribute and no parameter."""

    def __init__(self, spec: ShardingSpec) -> None:
        super().__init__()
        self.rows = rand(spec, 10, 4)


class Model(nn.Module):
    """Two tables and something that every rank has."""

    def __init__(self, spec: ShardingSpec, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed + dist.get_rank())
        self.first = Table(spec)
        self.second = Table(spec)
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.rand(3))
        self.register_state_dict_post_hook(state_dict_hook)
        self.register_load_state_dict_pre_hook(pre_load_state_dict_hook)


def through_a_checkpoint(model: nn.Module, other: nn.Module) -> None:
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save(model.state_dict(), checkpoint_id=folder[0])
    loaded = other.state_dict()
    dcp.load(loaded, checkpoint_id=folder[0])
    other.load_state_dict(loaded, strict=False)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def main() -> Results:
    rows = ChunkShardingSpec(dim=0, placements=places())
    columns = ChunkShardingSpec(dim=1, placements=places())
    ragged = EnumerableShardingSpec(
        [
            ShardMetadata([0, 0], [3, 4], "rank:1/cpu"),
            ShardMetadata([3, 0], [1, 4], "rank:0/cpu"),
            ShardMetadata([4, 0], [6, 4], "rank:1/cpu"),
        ]
    )
    model = Model(rows, seed=1)
    found: Results = {
        "keys": list(model.state_dict()),
        "first": gathered(model.first.rows),
        "second": gathered(model.second.rows),
        "scale": model.scale.tolist(),
    }
    for name, spec in (("columns", columns), ("ragged", ragged), ("rows", rows)):
        other = Model(spec, seed=2)
        through_a_checkpoint(model, other)
        found[name] = {
            "first": gathered(other.first.rows),
            "second": described(other.second.rows),
            "scale": other.scale.tolist(),
        }
        model = other

    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    with load_with_process_group(dist.group.WORLD):
        state = torch.load(file, weights_only=False)
    last = Model(rows, seed=3)
    last.load_state_dict(state, strict=False)
    found["pickled"] = {"first": gathered(last.first.rows), "second": described(last.second.rows)}
    return found


if __name__ == "__main__":
    launch(main)
