"""The names of `torch.distributed._shard.sharded_optim`, for code that changes its import."""

from shoal.sharded_optim import api
from shoal.tensor.shard_optimizer import ShardedOptimizer, named_params_with_sharded_tensor

__all__ = ["ShardedOptimizer", "api", "named_params_with_sharded_tensor"]
