"""Debug a hang: ranks that do different things, and how shoal names the one that did.

    torchrun --nproc-per-node 2 examples/debug_a_hang.py
    torchrun --nproc-per-node 2 examples/debug_a_hang.py --mistake stays-away
    SHOAL_DEBUG=collectives torchrun --nproc-per-node 2 examples/debug_a_hang.py --mistake order

Every rank must launch the same collectives in the same order. Here rank 1 can be told not to.
The first command trains; the other two end with the name of rank, collective and unit.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from start import Model, batch, join_ranks
from torch.nn import functional as F

from shoal import fully_shard
from shoal.watch import Watchdog

MISTAKES = ("none", "stays-away", "order")


class Reversed(Model):
    """Its blocks run backwards where `backwards` is set."""

    backwards = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give the logits of the classes."""
        for block in reversed(self.blocks) if self.backwards else self.blocks:
            x = block(x)
        return self.head(x)


def train(mistake: str, num_steps: int = 6) -> float:
    """Train; in the fourth step, rank 1 makes the mistake."""
    torch.manual_seed(0)
    model = Reversed()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = torch.zeros(())
    for step in range(num_steps):
        is_wrong = step == 3 and dist.get_rank() == 1
        if is_wrong and mistake == "stays-away":
            time.sleep(3600)  # an input pipeline that never answers
        model.backwards = is_wrong and mistake == "order"
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main(mistake: str = "none", limit_s: float = 300.0, folder: Path | None = None) -> float:
    """Train under a watchdog, which ends all ranks if one of them waits longer than the limit."""
    with Watchdog(limit_s=limit_s, folder=folder):  # on every rank, after init_process_group
        loss = train(mistake)
    if dist.get_rank() == 0:
        print(f"all ranks did the same; loss {loss:.3f}")
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mistake", choices=MISTAKES, default="none")
    parser.add_argument("--limit", type=float, default=5.0, help="seconds; 300 in real runs")
    given = parser.parse_args()
    join_ranks()
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    main(given.mistake, given.limit, Path(folders[0]))
    dist.destroy_process_group()
