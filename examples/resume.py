"""Resume: save while training, and go on from the newest checkpoint, on any number of ranks.

    torchrun --nproc-per-node 2 examples/resume.py --folder /tmp/run --steps 10
    torchrun --nproc-per-node 1 examples/resume.py --folder /tmp/run --steps 20

A checkpoint is a folder that is whole or not there. It holds weights, optimizer state, learning
rates and random generators. It does not depend on how many ranks wrote it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from start import DEVICE, Model, join_ranks
from torch.nn import functional as F

from shoal import fully_shard
from shoal.checkpoint import Retention, latest, load_training, save_training, step_folder

GLOBAL_BATCH = 64
SAVE_EVERY = 5


def main(folder: Path, num_steps: int) -> dict[int, float]:
    """Train up to a step, from the newest checkpoint if there is one; return mean losses."""
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    found = latest(folder)  # None before the first checkpoint
    start = 0 if found is None else load_training(found, model, optimizer)["step"]
    if dist.get_rank() == 0:
        print(f"begin at step {start} on {dist.get_world_size()} ranks")

    losses = {}
    for step in range(start, num_steps):
        x, y = share_of(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses[step] = mean.item()
        if (step + 1) % SAVE_EVERY == 0:
            save_training(step_folder(folder, step + 1), model, optimizer, {"step": step + 1})
            if dist.get_rank() == 0:
                Retention(last=2).apply(folder)
    if dist.get_rank() == 0 and losses:
        print(f"step {num_steps}: loss {losses[num_steps - 1]:.6f}, saved in {folder}")
    return losses


def share_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a step's batch, which is the same on any number of ranks."""
    x = torch.randn(GLOBAL_BATCH, 32, generator=torch.Generator().manual_seed(step))
    mine = x.chunk(dist.get_world_size())[dist.get_rank()].to(DEVICE)
    return mine, mine[:, :8].argmax(dim=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    join_ranks()
    if given.folder is None:  # nothing to go on from later
        folders = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folders)
        given.folder = Path(folders[0])
    main(given.folder, given.steps)
    dist.destroy_process_group()
