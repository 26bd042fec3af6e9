"""Train a pipeline of two stages, each sharded over the data-parallel ranks.

    torchrun --nproc-per-node 2 examples/pipeline.py
    torchrun --nproc-per-node 4 examples/pipeline.py --schedule Interleaved1F1B

Ranks form a mesh (2, n): stages over the first axis, shards of each stage over the second. Stages
are gathered once in a step (`reshard_after_forward=False`) and reduced once, after the backwards of
all micro-batches. The loss is compared with that of the unsharded model in one process.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional as F

from shoal.fsdp import fully_shard

DIM = 16
NUM_MICRO_BATCHES = 4
SINGLE = ("GPipe", "1F1B")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def stages(num: int) -> list[nn.Sequential]:
    """The model, cut: the same weights on every rank."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM)) for _ in range(num)]


def batch_of(step: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors, and these sorted, which the model is to learn."""
    generator = torch.Generator().manual_seed(100 * step + place)
    x = torch.randn(2 * NUM_MICRO_BATCHES, DIM, generator=generator)
    return x, x.sort().values


def train(name: str, num_steps: int) -> list[float]:
    """Losses of this rank's data, on the ranks that have the last stage; nothing on others."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pipe", "dp"))
    index, place = mesh["pipe"].get_local_rank(), mesh["dp"].get_local_rank()
    mine = [index] if name in SINGLE else [index, 3 - index if name in V_SHAPED else index + 2]
    num = 2 * len(mine)
    modules = [stages(num)[number] for number in mine]
    for module in modules:
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
    group, device = mesh["pipe"].get_group(), torch.device("cpu")
    made = [
        PipelineStage(module, number, num, device, group=group)
        for module, number in zip(modules, mine, strict=True)
    ]
    schedule = getattr(schedules, f"Schedule{name}")(
        made[0] if name in SINGLE else made, NUM_MICRO_BATCHES, loss_fn=F.mse_loss
    )
    optimizer = torch.optim.AdamW([p for m in modules for p in m.parameters()], lr=1e-2)
    means: list[float] = []
    for step in range(num_steps):
        x, target = batch_of(step, place)
        losses: list[torch.Tensor] = []
        ends = {"target": target, "losses": losses} if num - 1 in mine else {}
        schedule.step(*([x] if 0 in mine else []), **ends)
        if losses:
            means.append(torch.stack(losses).mean().item())
        optimizer.step()
        optimizer.zero_grad()
    return means


def train_unsharded(name: str, num_steps: int, num_places: int) -> list[list[float]]:
    """The losses of all ranks' data, in one process."""
    model = nn.Sequential(*stages(2 if name in SINGLE else 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    means: list[list[float]] = []
    for step in range(num_steps):
        batches = [batch_of(step, place) for place in range(num_places)]
        losses = [F.mse_loss(model(x), target) for x, target in batches]
        (torch.stack(losses).mean()).backward()
        means.append([loss.item() for loss in losses])
        optimizer.step()
        optimizer.zero_grad()
    return means


def main() -> None:
    """Train, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--schedule", default="1F1B", help="as in Schedule1F1B")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    num_places = dist.get_world_size() // 2
    found = train(args.schedule, args.steps)
    expected = train_unsharded(args.schedule, args.steps, num_places)
    if found:
        own = [losses[dist.get_rank() % num_places] for losses in expected]
        torch.testing.assert_close(torch.tensor(found), torch.tensor(own), rtol=1e-3, atol=1e-4)
        print(f"rank {dist.get_rank()}: loss {found[0]:.4f} to {found[-1]:.4f}, as unsharded")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
