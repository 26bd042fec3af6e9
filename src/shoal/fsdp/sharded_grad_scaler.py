"""The name of `torch.distributed.fsdp.sharded_grad_scaler`, which needs no engine."""

from shoal.doors.fsdp1.gradients import ShardedGradScaler

__all__ = ["ShardedGradScaler"]
