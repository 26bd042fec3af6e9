"""shoal: sharded training on PyTorch, where a step is a plan."""

from shoal.runtime.fully_shard import FSDPModule, fully_shard
from shoal.runtime.policy import MixedPrecisionPolicy
from shoal.version import __version__

__all__ = ["FSDPModule", "MixedPrecisionPolicy", "__version__", "fully_shard"]
