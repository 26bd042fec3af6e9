"""Losses are scaled for float16; a step with infinities on one rank is skipped on all.

torchrun --nproc-per-node 2 grad_scaler.py
"""

from typing import Any

import torch
import torch.distributed as dist
from tiny import Block, Results, Transformer, batches, launch, next_token_loss, read_state
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def run(device: torch.device, **options: Any) -> Results:
    torch.manual_seed(0)
    model = FSDP(
        Transformer(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device, **options
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler(device=device.type, init_scale=2.0**8, growth_interval=2)
    losses, scales, norms = [], [], []
    for index, tokens in enumerate(batches(5, device)):
        loss = next_token_loss(model, tokens)
        scaler.scale(loss).backward()
        if index == 2 and dist.get_rank() == 0:
            grad = next(p.grad for p in model.parameters() if p.grad is not None)
            grad.view(-1)[0] = float("inf")
        scaler.unscale_(optimizer)
        norm = model.clip_grad_norm_(1.0)
        norms.append(norm.item() if norm.isfinite() else None)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return {"losses": losses, "scales": scales, "norms": norms, "state": read_state(model)}


def main(device: torch.device) -> Results:
    half = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)
    return {
        "full": run(device, use_orig_params=True),
        "flat": run(device, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
        "half": run(device, mixed_precision=half, use_orig_params=True),
    }


if __name__ == "__main__":
    launch(main)
