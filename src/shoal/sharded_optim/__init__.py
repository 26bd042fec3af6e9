"""The names of `torch.distributed._shard.sharded_optim`, for code that changes its import."""

from shoal.doors.sharded_tensor.sharded_optimizer import (
    ShardedOptimizer,
    named_params_with_sharded_tensor,
)
from shoal.sharded_optim import api

__all__ = ["ShardedOptimizer", "api", "named_params_with_sharded_tensor"]
