"""Full state dicts for export, sharded ones for a checkpoint, and training on from either.

torchrun --nproc-per-node 2 state_dicts.py
"""

import io
import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tiny import (
    Results,
    Transformer,
    batches,
    launch,
    next_token_loss,
    read_optimizer,
    read_state,
    reading,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer


def build(device: torch.device, seed: int) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    model = Transformer(num_layers=2).to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: Optimizer, device: torch.device) -> list[float]:
    losses = []
    for tokens in batches(2, device):
        loss = next_token_loss(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def through_rank_0(
    model: nn.Module, optimizer: Optimizer, device: torch.device
) -> tuple[Results, nn.Module, Optimizer]:
    """Collect everything in one file on rank 0, and deal it to a new model."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=whole)
    moments = get_optimizer_state_dict(model, optimizer, options=whole)
    found = {name: reading(torch.as_tensor(tensor)) for name, tensor in weights.items()}
    file = io.BytesIO()
    torch.save((weights, moments), file)
    file.seek(0)
    weights, moments = torch.load(file)

    other, other_optimizer = build(device, seed=1)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, weights, options=spread)
    set_optimizer_state_dict(other, other_optimizer, moments, options=spread)
    return found, other, other_optimizer


def through_a_checkpoint(
    model: nn.Module, optimizer: Optimizer, device: torch.device
) -> tuple[nn.Module, Optimizer]:
    """Save this rank's shards, and load them into a new model."""
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder[0])

    other, other_optimizer = build(device, seed=2)
    weights, moments = get_state_dict(other, other_optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder[0])
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=moments)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return other, other_optimizer


def main(device: torch.device) -> Results:
    model, optimizer = build(device, seed=0)
    losses = train(model, optimizer, device)
    full, exported, exported_optimizer = through_rank_0(model, optimizer, device)
    loaded, loaded_optimizer = through_a_checkpoint(exported, exported_optimizer, device)
    found = {
        "losses": losses,
        "full": full,
        "exported": read_state(exported),
        "exported_optimizer": read_optimizer(exported_optimizer),
        "loaded": read_state(loaded),
    }
    continued = [
        train(model, optimizer, device),
        train(exported, exported_optimizer, device),
        train(loaded, loaded_optimizer, device),
    ]
    for other in continued[1:]:
        torch.testing.assert_close(other, continued[0])
    return found | {
        "continued": continued,
        "model": read_state(loaded),
        "optimizer": read_optimizer(loaded_optimizer),
    }


if __name__ == "__main__":
    launch(main)
