"""The names of the `api` modules of `torch.distributed._shard` and of its `sharded_tensor`."""

from shoal._torch.sharded import LocalShard as Shard
from shoal._torch.sharded import (
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    load_with_process_group,
)
from shoal._torch.sharded import empty_like_properties as _create_tensor_from_params
from shoal._torch.sharded import group_to_load_into as _get_current_process_group
from shoal.doors.sharded_tensor.from_local_shards import init_from_local_shards
from shoal.doors.sharded_tensor.remote_shards import SHARED as _sharded_tensor_map
from shoal.doors.sharded_tensor.shard_module import collect_local_shard as _collect_local_shard
from shoal.doors.sharded_tensor.shard_module import reshard_output as _reshard_output
from shoal.doors.sharded_tensor.shard_module import shard_module, shard_parameter
from shoal.doors.sharded_tensor.shard_module import shard_tensor as _shard_tensor
from shoal.tensor.base import ShardedTensorBase
from shoal.tensor.sharded import ShardedTensor

__all__ = [
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "TensorProperties",
    "_collect_local_shard",
    "_create_tensor_from_params",
    "_get_current_process_group",
    "_reshard_output",
    "_shard_tensor",
    "_sharded_tensor_map",
    "init_from_local_shards",
    "load_with_process_group",
    "shard_module",
    "shard_parameter",
]
