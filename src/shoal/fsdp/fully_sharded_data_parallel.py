"""The names of `torch.distributed.fsdp.fully_sharded_data_parallel`, on shoal's engine.

Torch lists two of them; the others are there too, and code in the wild imports them from there.
"""

from torch.distributed.fsdp import FlatParameter, OptimStateKeyType
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from shoal.fsdp import api
from shoal.fsdp.api import *  # noqa: F403
from shoal.wrapper.flat_parameter import NAME as FLAT_PARAM
from shoal.wrapper.fully_sharded import FullyShardedDataParallel

__all__ = [
    *api.__all__,
    "FLAT_PARAM",
    "CustomPolicy",
    "FlatParameter",
    "FullyShardedDataParallel",
    "ModuleWrapPolicy",
    "OptimStateKeyType",
]
