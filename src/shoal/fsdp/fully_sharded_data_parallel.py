"""The names of `torch.distributed.fsdp.fully_sharded_data_parallel`, on shoal's engine.

Torch lists two of them; the others are there too, and code in the wild imports them from there.
"""

from torch.distributed.fsdp import FlatParameter, OptimStateKeyType
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from shoal.doors.fsdp1.fully_sharded import FullyShardedDataParallel
from shoal.doors.fsdp1.parameters import FLAT_PARAM as FLAT_PARAM
from shoal.fsdp import api
from shoal.fsdp.api import *  # noqa: F403

__all__ = [
    *api.__all__,
    "FLAT_PARAM",
    "CustomPolicy",
    "FlatParameter",
    "FullyShardedDataParallel",
    "ModuleWrapPolicy",
    "OptimStateKeyType",
]
