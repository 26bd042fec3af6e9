"""Hooks that reduce gradients in the engine's place.

torchrun --nproc-per-node 2 comm_hooks.py
"""

from typing import Any

import torch
import torch.distributed as dist
from tiny import Block, Results, Transformer, launch, read_state
from tiny_steps import train
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Counted:
    """What a hook of this script remembers."""

    def __init__(self) -> None:
        self.calls = 0
        self.dims: set[int] = set()


def summed_in_half(state: Counted, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Send half the bytes."""
    state.calls += 1
    state.dims.add(grad.dim())
    small = grad.div(dist.get_world_size()).to(torch.bfloat16)
    if output is None:
        dist.all_reduce(small)
        grad.copy_(small)
        return
    piece = torch.empty(output.shape, dtype=small.dtype, device=small.device)
    dist.reduce_scatter_tensor(piece, small)
    output.copy_(piece)


def build(device: torch.device, strategy: ShardingStrategy) -> FSDP:
    torch.manual_seed(0)
    return FSDP(
        Transformer(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=strategy,
        device_id=device,
        use_orig_params=True,
    )


def results(model: FSDP, device: torch.device) -> Results:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"losses": train(model, optimizer, device, num=3), "state": read_state(model)}


def main(device: torch.device) -> Results:
    found: Results = {}
    hooks: dict[ShardingStrategy, Any] = {
        ShardingStrategy.FULL_SHARD: default_hooks.reduce_scatter_hook,
        ShardingStrategy.SHARD_GRAD_OP: default_hooks.reduce_scatter_hook,
        ShardingStrategy.NO_SHARD: default_hooks.allreduce_hook,
    }
    for strategy, hook in hooks.items():
        model = build(device, strategy)
        model.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), hook)
        found[f"default {strategy.name}"] = results(model, device)

        counted = Counted()
        model = build(device, strategy)
        model.register_comm_hook(counted, summed_in_half)
        found[f"own {strategy.name}"] = results(model, device)
        found[f"own {strategy.name}"] |= {"calls": counted.calls, "dims": sorted(counted.dims)}
    return found


if __name__ == "__main__":
    launch(main)
