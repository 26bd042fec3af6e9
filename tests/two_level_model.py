"""A small model that any engine shards in two levels, for checkpoints between engines."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

BETAS = (0.8, 0.9)


def build(
    shard: Any, seed: int, width: int, num_outputs: int, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Shard the first layer, then all; `shard` is a wrapper's class, or `fully_shard`."""
    torch.manual_seed(seed)
    layers = (nn.Linear(3, width), nn.LayerNorm(width), nn.Linear(width, num_outputs))
    model: Any = nn.Sequential(*layers)
    model[0] = shard(model[0], **options)
    model = shard(model, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, betas=BETAS)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> list[float]:
    """The same batches on all ranks, so that any number of them computes the same losses."""
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(num_steps):
        loss = model(torch.randn(4, 3, generator=generator)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
