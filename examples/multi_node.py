"""Train on several machines; each starts the same command.

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        examples/multi_node.py --folder /shared/run
    srun --ntasks-per-node 8 python examples/multi_node.py --folder /shared/run

A run that is started again goes on from its newest checkpoint, on any number of machines.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shoal import fully_shard
from shoal.checkpoint import latest, load_training, save_training, step_folder
from shoal.integrations.slurm import announce
from shoal.watch import Watchdog


def main() -> None:
    """Meet the other ranks, train, and end with a clear word if one of them is lost."""
    options = parse()
    announce()  # under srun alone: gives torch the variables that torchrun would set
    gpu = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    if gpu:
        torch.cuda.set_device(dist.get_node_local_rank())
    with Watchdog(limit_s=options.limit_s):
        train(options)
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="one that all machines see")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--limit-s", type=float, default=300, help="longest wait for a rank")
    return parser.parse_args()


def train(options: argparse.Namespace) -> None:
    """Go on from the newest checkpoint to the last step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = latest(options.folder)
    first = 0 if found is None else load_training(found, model, optimizer)["step"]
    device = next(model.parameters()).device
    for step in range(int(first) + 1, options.steps + 1):
        batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(device)
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} of {dist.get_world_size()} ranks: loss {loss:.6f}", flush=True)
        if step % options.save_every == 0:
            save_training(step_folder(options.folder, step), model, optimizer, {"step": step})


if __name__ == "__main__":
    main()
