"""Compile: forward and backward as graphs with the collectives in them, or the whole step.

    torchrun --nproc-per-node 2 examples/compile_model.py
    torchrun --nproc-per-node 2 examples/compile_model.py --inner inductor

`torch.compile(model, backend="shoal")` captures the sharded model, gathers and reductions
included. `compile_step` captures clipping and the optimizer too. Losses are those of eager.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from start import Model, batch, join_ranks
from torch import nn
from torch.nn import functional as F

import shoal.compile  # noqa: F401  makes the backend known; an installed shoal is known already
from shoal import compile_step, fully_shard

NUM_STEPS = 4


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model, with its optimizer."""
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3, capturable=False)


def eager() -> list[float]:
    """Train as written."""
    return train(*sharded())


def graphs(inner: str = "direct") -> list[float]:
    """Train with forward and backward as graphs."""
    model, optimizer = sharded()
    compiled = torch.compile(model, backend="shoal", options={"inner": inner})
    return train(compiled, optimizer)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train, and return this rank's losses."""
    losses = []
    for number in range(NUM_STEPS):
        x, y = batch(number)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole_steps() -> list[float]:
    """Train with each step as one graph: forward, backward, clipping, optimizer."""
    model, optimizer = sharded()
    step = compile_step(model, F.cross_entropy, optimizer, max_norm=1.0)
    losses = [step(*batch(number)).item() for number in range(NUM_STEPS)]
    if step.why_not_captured:
        print(f"not captured: {step.why_not_captured}")
    return losses


def main(inner: str = "direct") -> dict[str, list[float]]:
    """Train in all three ways; return this rank's losses of each."""
    losses = {"eager": eager(), "graphs": graphs(inner), "whole steps": whole_steps()}
    if dist.get_rank() == 0:
        for name, values in losses.items():
            print(f"{name:12} {values}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inner", choices=("direct", "inductor"), default="direct")
    given = parser.parse_args()
    join_ranks()
    main(given.inner)
    dist.destroy_process_group()
