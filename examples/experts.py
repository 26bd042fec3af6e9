"""Train a small mixture of experts: experts over one axis of ranks, data over both.

    python examples/experts.py
    torchrun --nproc-per-node 4 examples/experts.py --experts-axis 2

Each layer routes every token to two of its experts. Ranks of the axis "ep" hold different experts,
and send each other the tokens for them; each expert is sharded over the axis "dp". All ranks have
data of their own. With `--check` the loss is compared with that of the unsharded model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from shoal.experts import Experts, shard_experts
from shoal.fsdp import fully_shard

VOCABULARY = 32
CONTEXT = 16
DIM = 32


class Block(nn.Module):
    """Mixes positions by a running mean, then sends each token to two experts."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mix = nn.Linear(DIM, DIM)
        self.router = nn.Linear(DIM, num_experts, bias=False)
        self.experts = Experts(num_experts, DIM, 2 * DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the mixing and the experts say."""
        positions = torch.arange(1, x.shape[1] + 1, device=x.device).unsqueeze(-1)
        x = x + self.mix(x.cumsum(1) / positions)
        normed = self.norm(x)
        weights, chosen = self.router(normed).softmax(-1).topk(2)
        return x + self.experts(normed, chosen, weights)


class Model(nn.Module):
    """Predicts the next token."""

    def __init__(self, num_experts: int, num_blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block(num_experts) for _ in range(num_blocks))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of every token but the first."""
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def batch_of(step: int, rank: int) -> torch.Tensor:
    """Tokens that count up, by a stride of each row's own."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    starts, strides = torch.randint(1, VOCABULARY, (2, 8, 1), generator=generator)
    return (starts + strides.remainder(4) * torch.arange(CONTEXT)) % VOCABULARY


def built(num_experts: int) -> Model:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return Model(num_experts)


def train(model: Model, num_steps: int, ranks: Sequence[int]) -> list[float]:
    """Train on the data of these ranks; returns this process' losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    for step in range(num_steps):
        total = 0.0
        for rank in ranks:
            loss = model(batch_of(step, rank)) / len(ranks)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def main() -> None:
    """Train, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--num-experts", type=int, default=8)
    parser.add_argument("--experts-axis", type=int, default=1, help="ranks that share out experts")
    parser.add_argument("--check", action="store_true", help="compare with the unsharded model")
    args = parser.parse_args()
    if not dist.is_initialized():
        alone = {} if dist.is_torchelastic_launched() else {"rank": 0, "world_size": 1}
        dist.init_process_group("gloo", store=dist.HashStore() if alone else None, **alone)
    rank, size = dist.get_rank(), dist.get_world_size()
    shape = (size // args.experts_axis, args.experts_axis)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
    model = built(args.num_experts)
    for block in model.blocks:
        shard_experts(block.experts, mesh)  # pyright: ignore[reportArgumentType]
        fully_shard(block)
    fully_shard(model)
    losses = torch.tensor(train(model, args.steps, [rank]))
    dist.all_reduce(losses)
    losses /= size
    if rank == 0:
        print(f"{size} ranks, mesh {shape}: loss {losses[0]:.4f} to {losses[-1]:.4f}")
    if args.check:
        expected = torch.tensor(train(built(args.num_experts), args.steps, range(size)))
        torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)
        if rank == 0:
            print("equal to the unsharded model's")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
