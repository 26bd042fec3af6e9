"""Gather weights in 8 or 4 bits, and reduce gradients in 8, beside bf16: fewer bytes, equal losses.

    torchrun --nproc-per-node 2 examples/fp8.py

The optimizer, checkpoints and state dicts have fp32 weights. Matmuls are in bf16.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from start import Model, batch, join_ranks
from torch.nn import functional as F

from shoal.fsdp import MixedPrecisionPolicy, fully_shard, plan_of
from shoal.low_precision import MXFP8, NVFP4, Float8, Int8

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
POLICIES = {
    "bf16": HALF,
    "float8": MixedPrecisionPolicy(torch.bfloat16, torch.float32, gather_format=Float8()),
    "mxfp8": MixedPrecisionPolicy(torch.bfloat16, torch.float32, gather_format=MXFP8()),
    "nvfp4": MixedPrecisionPolicy(torch.bfloat16, torch.float32, gather_format=NVFP4()),
    "mxfp8, int8": MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        gather_format=MXFP8(),
        reduce_format=Int8(),
    ),
}


def train(policy: MixedPrecisionPolicy, num_steps: int) -> tuple[int, list[float]]:
    """The bytes of one gather of all units, and the losses of a run, averaged over the ranks."""
    torch.manual_seed(0)
    model = Model(num_blocks=2)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(num_steps):
        x, y = batch(step)
        loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    moved = sum(unit.encoded_bytes or unit.gathered_bytes for unit in plan_of(model).units)
    return moved, losses


def main(num_steps: int = 200) -> dict[str, tuple[int, list[float]]]:
    """Train by each policy on the same batches."""
    runs = {name: train(policy, num_steps) for name, policy in POLICIES.items()}
    if dist.get_rank() == 0:
        for name, (moved, losses) in runs.items():
            last = losses[-20:]
            print(f"{name:12} {moved:,} bytes a gather, loss {sum(last) / len(last):.3f}")
    return runs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    join_ranks()
    main(parser.parse_args().steps)
    dist.destroy_process_group()
