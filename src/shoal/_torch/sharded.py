"""torch's sharded tensors: their metadata, specs, plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard import api as shard_api
from torch.distributed._shard import sharded_tensor, sharding_spec
from torch.distributed._shard.metadata import ShardMetadata as ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import (
    MEM_FORMAT_ENCODING as MEM_FORMAT_ENCODING,
)
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata as ShardedTensorMetadata,
)
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as TensorProperties
from torch.distributed._shard.sharder import Sharder as Sharder
from torch.distributed._shard.sharding_plan import ShardingPlan as ShardingPlan
from torch.distributed._shard.sharding_plan import ShardingPlanner as ShardingPlanner
from torch.distributed._shard.sharding_spec import ChunkShardingSpec as ChunkShardingSpec
from torch.distributed._shard.sharding_spec import DevicePlacementSpec as DevicePlacementSpec
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec as EnumerableShardingSpec
from torch.distributed._shard.sharding_spec import PlacementSpec as PlacementSpec
from torch.distributed._shard.sharding_spec import ShardingSpec as ShardingSpec
from torch.distributed._shard.sharding_spec._internals import check_tensor as check_tensor
from torch.distributed._shard.sharding_spec._internals import (
    get_chunk_sharding_params as get_chunk_sharding_params,
)
from torch.distributed._shard.sharding_spec._internals import (
    get_chunked_dim_size as get_chunked_dim_size,
)
from torch.distributed._shard.sharding_spec._internals import get_split_size as get_split_size
from torch.distributed._shard.sharding_spec._internals import (
    validate_non_overlapping_shards_metadata as validate_non_overlapping_shards_metadata,
)
from torch.distributed.remote_device import _remote_device as RemoteDevice

LocalShard = sharded_tensor.Shard
"""A local tensor with its metadata; named so that it is not taken for DTensor's `Shard`."""


parse_remote_device: Callable[[Any, RemoteDevice | None], tuple[int | None, torch.device]] = cast(
    Any, sharded_tensor
).utils._parse_and_validate_remote_device
"""Global rank and device of a placement, which must be in the group or name an RPC worker."""


build_metadata_from_local_shards: Callable[..., ShardedTensorMetadata] = cast(
    Any, sharded_tensor
).utils.build_metadata_from_local_shards
"""Metadata of one rank's shards, after a look at whether they can be right."""


build_global_metadata: Callable[..., ShardedTensorMetadata] = cast(
    Any, sharded_tensor
).utils.build_global_metadata
"""Metadata of all ranks' shards, of those that each rank has of its own."""


inferred_spec: Callable[[list[ShardMetadata]], ShardingSpec] = (
    sharding_spec._infer_sharding_spec_from_shards_metadata
)
"""The spec that would cut a tensor into such shards: chunks if they are equal, else a list."""


load_with_process_group = shard_api.load_with_process_group
"""A context in which sharded tensors, torch's and ours, are unpickled into a group."""


group_to_load_into: Callable[[], dist.ProcessGroup] = shard_api._get_current_process_group
"""The group of that context, or the default one."""


empty_like_properties: Callable[..., Tensor] = sharded_tensor.api._create_tensor_from_params
"""An empty tensor of a size on a device, with what `TensorProperties` say."""


def on_device(remote: RemoteDevice, device: torch.device) -> RemoteDevice:
    """The same rank or worker, but another of its devices."""
    moved = RemoteDevice(device)
    moved._rank, moved._worker_name = remote._rank, remote._worker_name
    return moved


TorchShardedTensor = sharded_tensor.ShardedTensor
"""The class that torch's checkpoints and users' code look for."""
