"""Tensors of listed shards made from whole ones: a shard for each rank, several, or none."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shoal.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from shoal.tensor import Listed, ShardedTensor
from shoal.tensor.sharded import allocate

Shape = tuple[int, ...]


def chunks(dim: int, ranks: Sequence[int]) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks])


def everyone() -> list[int]:
    return [*range(dist.get_world_size())]


def tiles(shape: Shape) -> EnumerableShardingSpec:
    """Uneven quarters of a matrix, dealt out to as many ranks as there are, and an empty shard."""
    rows, columns = shape
    row, column = rows // 3, 2 * columns // 3
    corners = [
        ((0, 0), (row, column)),
        ((0, column), (row, columns - column)),
        ((row, 0), (rows - row, column)),
        ((row, column), (rows - row, columns - column)),
        ((rows, 0), (0, columns)),
    ]
    world_size = dist.get_world_size()
    return EnumerableShardingSpec(
        [
            ShardMetadata([*offsets], [*sizes], f"rank:{(index + 1) % world_size}/cpu")
            for index, (offsets, sizes) in enumerate(corners)
        ]
    )


CUTS: dict[str, Callable[[Shape], Any]] = {
    "one shard each": lambda shape: chunks(0, everyone()),
    "other order": lambda shape: chunks(0, everyone()[::-1]),
    "several shards": lambda shape: chunks(0, everyone() * 2),
    "one rank has all": lambda shape: chunks(0, everyone()[-1:]),
}
"""For tensors of any number of dims but none."""

MATRIX_CUTS: dict[str, Callable[[Shape], Any]] = {
    **CUTS,
    "columns": lambda shape: chunks(1, everyone()),
    "columns in other order": lambda shape: chunks(1, everyone()[::-1]),
    "several bands of columns": lambda shape: chunks(-1, everyone() * 2),
    "tiles": tiles,
}


def listed(whole: torch.Tensor, spec: Any) -> ShardedTensor:
    """This rank's shards of a tensor that every rank has."""
    assert dist.group.WORLD is not None
    tensor = allocate(Listed.of_spec(spec, whole.shape, dist.group.WORLD), whole.dtype)
    tensor.copy_(whole.detach())
    return tensor
