"""The name of `torch.distributed._shard.sharded_optim.api`."""

from shoal.tensor.shard_optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
