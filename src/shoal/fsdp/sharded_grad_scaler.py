"""The name of `torch.distributed.fsdp.sharded_grad_scaler`: torch's own, which needs no engine.

It looks for infinities in the gradients that an optimizer holds, whoever sharded them, and lets the
ranks agree on what they found.
"""

from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

__all__ = ["ShardedGradScaler"]
