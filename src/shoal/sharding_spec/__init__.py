"""The names of `torch.distributed._shard.sharding_spec`, for code that changes its import."""

from shoal._torch.sharded import (
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    ShardingSpec,
    ShardMetadata,
)
from shoal.doors.sharded_tensor.custom_ops import custom_sharding_spec_op
from shoal.sharding_spec import _internals, api, chunk_sharding_spec
from shoal.tensor.spec import ChunkShardingSpec
from shoal.tensor.spec import spec_of as _infer_sharding_spec_from_shards_metadata

__all__ = [
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "PlacementSpec",
    "ShardMetadata",
    "ShardingSpec",
    "_infer_sharding_spec_from_shards_metadata",
    "_internals",
    "api",
    "chunk_sharding_spec",
    "custom_sharding_spec_op",
]
