"""The name of `torch.distributed._shard.sharded_optim.api`."""

from shoal.doors.sharded_tensor.sharded_optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
