"""Start: shard a model over ranks, and train it.

    python examples/start.py
    torchrun --nproc-per-node 2 examples/start.py

Each rank holds its share of every parameter, gradient and optimizer state. A block's parameters
are gathered before the block computes, and freed after.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from shoal import fully_shard

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    """A residual block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to each position what the block makes of it."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Tells the class of a vector."""

    def __init__(self, dim: int = 32, num_blocks: int = 3, num_classes: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_blocks))
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give the logits of the classes."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int, size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's samples of a step: the class is the largest of the first eight numbers."""
    seed = step * dist.get_world_size() + dist.get_rank()
    x = torch.randn(size, 32, generator=torch.Generator().manual_seed(seed))
    return x.to(DEVICE), x[:, :8].argmax(dim=1).to(DEVICE)


def main() -> list[float]:
    """Train for some steps, and return the losses, averaged over the ranks."""
    torch.manual_seed(0)  # all ranks build the same model
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    losses = []
    for step in range(20):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())

    held = sum(p.to_local().numel() for p in model.parameters())
    total = sum(p.numel() for p in model.parameters())
    print(f"rank {dist.get_rank()} holds {held:,} of {total:,} parameters")
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


def join_ranks() -> None:
    """Join the ranks that torchrun started; under plain `python`, be the only rank."""
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank(0))
    if dist.is_torchelastic_launched():
        dist.init_process_group()
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)


if __name__ == "__main__":
    join_ranks()
    main()
    dist.destroy_process_group()
