"""The names of `torch.distributed.fsdp`, on shoal's engine: change the import only."""

from shoal.runtime.fully_shard import FSDPModule, fully_shard
from shoal.runtime.policy import MixedPrecisionPolicy

__all__ = ["FSDPModule", "MixedPrecisionPolicy", "fully_shard"]
