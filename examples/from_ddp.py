"""From DDP: load the checkpoint of a DDP run into a sharded model, and go on.

    torchrun --nproc-per-node 2 examples/from_ddp.py

DDP puts `module.` before the names of weights, and its optimizer knows parameters by number. Both
are put right once; then rank 0's whole state dicts are spread over the ranks.
"""

from __future__ import annotations

import io

import torch
import torch.distributed as dist
from start import DEVICE, Model, batch, join_ranks
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.nn import functional as F
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel

from shoal import fully_shard
from shoal.fsdp import FullyShardedDataParallel as FSDP
from shoal.fsdp import OptimStateKeyType


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


def sharded(weights: dict, state: dict) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model with what a DDP run saved."""
    model = Model()
    consume_prefix_in_state_dict_if_present(weights, "module.")
    state = FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, model)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(model, weights, options=options)
    states.set_optimizer_state_dict(model, optimizer, state, options=options)
    return model, optimizer


def main() -> tuple[list[float], list[float]]:
    """Train under DDP; go on under DDP, and sharded; return both losses."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Model().to(DEVICE))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    steps(ddp, optimizer, range(4))
    file = io.BytesIO()  # stands for the run's checkpoint on a disk
    torch.save({"model": ddp.state_dict(), "optimizer": optimizer.state_dict()}, file)

    file.seek(0)
    saved = torch.load(file, map_location="cpu")
    model, sharded_optimizer = sharded(saved["model"], saved["optimizer"])
    went = steps(model, sharded_optimizer, range(4, 8))
    stayed = steps(ddp, optimizer, range(4, 8))
    if dist.get_rank() == 0:
        print(f"DDP          {stayed}\nfully_shard  {went}")
    return stayed, went


if __name__ == "__main__":
    join_ranks()
    main()
    dist.destroy_process_group()
