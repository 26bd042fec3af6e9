"""The names of `torch.distributed._shard.sharded_tensor`, for code that changes its import.

Beside them stand those of `torch.distributed._shard` and its `api`, `sharder` and `sharding_plan`:
how parameters of modules become sharded tensors.
"""

from shoal._torch.sharded import LocalShard as Shard
from shoal._torch.sharded import (
    ShardedTensorMetadata,
    Sharder,
    ShardingPlan,
    ShardingPlanner,
    ShardMetadata,
    TensorProperties,
    load_with_process_group,
)
from shoal.doors.sharded_tensor.creation import empty, full, ones, rand, randn, zeros
from shoal.doors.sharded_tensor.custom_ops import custom_sharded_op_impl
from shoal.doors.sharded_tensor.from_local_shards import init_from_local_shards
from shoal.doors.sharded_tensor.shard_module import shard_module, shard_parameter
from shoal.doors.sharded_tensor.state_dict_hooks import pre_load_state_dict_hook, state_dict_hook
from shoal.sharded_tensor import api, metadata, shard, utils
from shoal.sharded_tensor.api import _collect_local_shard, _reshard_output, _shard_tensor
from shoal.tensor.base import ShardedTensorBase
from shoal.tensor.sharded import ShardedTensor

__all__ = [
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "Sharder",
    "ShardingPlan",
    "ShardingPlanner",
    "TensorProperties",
    "_collect_local_shard",
    "_reshard_output",
    "_shard_tensor",
    "api",
    "custom_sharded_op_impl",
    "empty",
    "full",
    "init_from_local_shards",
    "load_with_process_group",
    "metadata",
    "ones",
    "pre_load_state_dict_hook",
    "rand",
    "randn",
    "shard",
    "shard_module",
    "shard_parameter",
    "state_dict_hook",
    "utils",
    "zeros",
]
