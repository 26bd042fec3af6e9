"""A gradient scaler for shards that may be on the host."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import sharded_grad_scaler as by_torch


class ShardedGradScaler(by_torch.ShardedGradScaler):
    """torch's, which waits for what it reads, and writes, on the host.

    It looks for infinities in the gradients that an optimizer holds, whoever sharded them, and lets
    the ranks agree on what they found.
    """

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        # torch begins to copy both to the host, and goes on there at once: offloaded gradients
        # would be multiplied by what is not there yet, and the late copy clears a flag that is set.
        if not inv_scale.is_cpu and _has_grads_on_host(optimizer):
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)


def _has_grads_on_host(optimizer: torch.optim.Optimizer) -> bool:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return any(p.grad is not None and p.grad.is_cpu for p in parameters)
