"""Shard within pairs of ranks, replicate between them, and reduce every other backward only.

torchrun --nproc-per-node 4 hybrid_sharding.py
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from tiny import Block, Results, Transformer, batches, launch, next_token_loss, read_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def run(device: torch.device, **options: Any) -> Results:
    torch.manual_seed(0)
    model = FSDP(
        Transformer(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=device,
        **options,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for index, tokens in enumerate(batches(6, device)):
        is_last = index % 2 == 1
        with nullcontext() if is_last else model.no_sync():
            loss = next_token_loss(model, tokens)
            (loss / 2).backward()
        losses.append(loss.item())
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return {
        "losses": losses,
        "sharded_over": dist.get_world_size(model.process_group),
        "state": read_state(model),
    }


def main(device: torch.device) -> Results:
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = mesh.get_group("shard"), mesh.get_group("replicate")
    hybrid = ShardingStrategy.HYBRID_SHARD
    return {
        "mesh": run(device, device_mesh=mesh, sharding_strategy=hybrid, use_orig_params=True),
        "groups": run(device, process_group=groups, sharding_strategy=hybrid),
        "full": run(device, sharding_strategy=ShardingStrategy.FULL_SHARD),
        "none": run(device, sharding_strategy=ShardingStrategy.NO_SHARD),
    }


if __name__ == "__main__":
    launch(main)
