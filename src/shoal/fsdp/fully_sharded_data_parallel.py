"""The names of `torch.distributed.fsdp.fully_sharded_data_parallel`, on shoal's engine."""

from torch.distributed.fsdp import OptimStateKeyType

from shoal.wrapper.fully_sharded import FullyShardedDataParallel

__all__ = ["FullyShardedDataParallel", "OptimStateKeyType"]
