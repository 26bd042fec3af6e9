"""Training steps on the GPU with any engine, and what each leaves behind."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from differential import Engine, gradients, snapshot
from oracle import Checkpoint, batches, build, full, loss_of

DEVICE = "cuda"

EPS = 1e-4
"""AdamW divides by a gradient's size: without it, rounding of tiny ones becomes whole updates."""


def model_for(
    engine: Engine,
    *,
    checkpoint: Checkpoint = "none",
    is_partly_frozen: bool = False,
    **options: Any,
) -> Any:
    """The oracle's model on the GPU, sharded by an engine."""
    model: Any = build(checkpoint, DEVICE)
    if is_partly_frozen:
        model.blocks[0].up.weight.requires_grad_(False)
        for parameter in model.blocks[1].parameters():
            parameter.requires_grad_(False)
    return engine.shard(model, **options)


def train(
    engine: Engine,
    model: Any,
    *,
    num_steps: int = 3,
    every: int = 1,
    max_norm: float | None = None,
    fused: bool | None = None,
    marks_updates: bool = False,
) -> list[Any]:
    """Steps of AdamW, each after `every` backwards of which the last one alone communicates."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS, fused=fused)
    seen: list[Any] = []
    data = batches(num_steps * every, dist.get_rank(), dist.get_world_size(), DEVICE)
    for index, (whole, part) in enumerate(data):
        is_last = index % every == every - 1
        if engine.is_sharded and every > 1:
            model.set_requires_gradient_sync(is_last)
        loss = loss_of(model, part if engine.is_sharded else whole)
        loss.backward()
        seen.append(engine.mean(loss))
        if not is_last:
            continue
        seen.append(gradients(model))
        if max_norm is not None:
            seen.append(full(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        if marks_updates and engine.is_sharded:
            model.set_post_optim_event(torch.cuda.current_stream().record_event())
        optimizer.zero_grad()
    return [*seen, snapshot(model, optimizer)]
