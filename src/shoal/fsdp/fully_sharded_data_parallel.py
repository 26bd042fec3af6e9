"""The names of `torch.distributed.fsdp.fully_sharded_data_parallel`, on shoal's engine.

Torch lists two of them; the others are there too, and code in the wild imports them from there.
"""

from torch.distributed.fsdp import FlatParameter, OptimStateKeyType
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from shoal.fsdp.api import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from shoal.wrapper.flat_parameter import NAME as FLAT_PARAM
from shoal.wrapper.fully_sharded import FullyShardedDataParallel

__all__ = [
    "FLAT_PARAM",
    "BackwardPrefetch",
    "CPUOffload",
    "CustomPolicy",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]
