"""The name of `torch.distributed.fsdp.sharded_grad_scaler`, which needs no engine."""

from shoal.wrapper.grad_scaler import ShardedGradScaler

__all__ = ["ShardedGradScaler"]
