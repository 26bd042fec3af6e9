"""The names of `torch.distributed.fsdp`, on shoal's engine: change the import only."""

from torch.distributed.fsdp import FlatParameter

from shoal.fsdp import api
from shoal.fsdp.api import *  # noqa: F403
from shoal.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel, OptimStateKeyType
from shoal.mesh import DataParallelMeshDims
from shoal.runtime.fsdp_module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from shoal.runtime.full_parameters import full_parameters
from shoal.runtime.fully_shard import fully_shard
from shoal.runtime.observe import plan_of
from shoal.runtime.policy import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
)

__all__ = [
    *api.__all__,
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "FlatParameter",
    "FullyShardedDataParallel",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateKeyType",
    "ShardPlacementResult",
    "UnshardHandle",
    "full_parameters",
    "fully_shard",
    "plan_of",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
