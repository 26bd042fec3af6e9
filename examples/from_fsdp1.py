"""From FSDP1: keep the wrapper, or load its checkpoint into `fully_shard`.

    torchrun --nproc-per-node 2 examples/from_fsdp1.py

`FullyShardedDataParallel` of shoal takes the arguments of torch's. A full state dict of either
loads into `fully_shard`, the optimizer's state included.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from start import DEVICE, Block, Model, batch, join_ranks
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.nn import functional as F

from shoal.fsdp import (  # was: torch.distributed.fsdp
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)
from shoal.fsdp.wrap import transformer_auto_wrap_policy  # was: torch.distributed.fsdp.wrap


def wrapped() -> nn.Module:
    """Make the model of a script for FSDP1."""
    torch.manual_seed(0)
    return FullyShardedDataParallel(
        Model(),
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={Block}
        ),
        device_id=torch.device(DEVICE),
        use_orig_params=True,
    )


def full_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict, dict]:
    """Whole weights and optimizer state, on rank 0, as FSDP1's scripts save them."""
    FullyShardedDataParallel.set_state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
    )
    return model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)


def moved(weights: dict, state: dict) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same training under `fully_shard`: rank 0 has the states, all ranks take their share."""
    from shoal import fully_shard

    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(model, weights, options=options)
    states.set_optimizer_state_dict(model, optimizer, state, options=options)
    return model, optimizer


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    """Train, and return this rank's losses."""
    losses = []
    for number in numbers:
        x, y = batch(number)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> tuple[list[float], list[float], list[float]]:
    """Train under the wrapper, then go on under the wrapper and under `fully_shard`."""
    model = wrapped()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    before = steps(model, optimizer, range(4))
    weights, state = full_states(model, optimizer)
    stayed = steps(model, optimizer, range(4, 8))
    went = steps(*moved(weights, state), range(4, 8))
    if dist.get_rank() == 0:
        print(f"wrapper      {stayed}\nfully_shard  {went}")
    return before, stayed, went


if __name__ == "__main__":
    join_ranks()
    main()
    dist.destroy_process_group()
