"""The names of `torch.distributed._shard.sharding_spec.api`."""

from shoal._torch.sharded import (
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    ShardingSpec,
    ShardMetadata,
)
from shoal.doors.sharded_tensor.custom_ops import custom_sharding_spec_op
from shoal.tensor.spec import spec_of as _infer_sharding_spec_from_shards_metadata

__all__ = [
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "PlacementSpec",
    "ShardMetadata",
    "ShardingSpec",
    "_infer_sharding_spec_from_shards_metadata",
    "custom_sharding_spec_op",
]
