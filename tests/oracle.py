"""Models and comparisons for tests of the engine, on any device.

The truth is the unsharded model in one process, and torch's own `fully_shard`.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from shoal.runtime.fully_shard import fully_shard
from shoal.runtime.policy import MixedPrecisionPolicy
from shoal.tensor.sharded import ShardedTensor

Checkpoint = Literal["none", "inside", "outside", "reentrant"]
CHECKPOINTS = get_args(Checkpoint)
"""How a block recomputes: within the unit, around it, around it by a backward inside backward."""


class Block(nn.Module):
    """Rows that divide no world size, a bias shorter than the world, a buffer."""

    def __init__(self, dim: int, checkpoint: Checkpoint) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim + 1)
        self.down = nn.Linear(2 * dim + 1, dim)
        self.scale = nn.Parameter(torch.ones(1))
        self.checkpoint = checkpoint
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpoint == "inside":
            return checkpoint(self._compute, x, use_reentrant=False)
        return self._compute(x)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Blocks between an embedding and a head that share one weight."""

    def __init__(self, dim: int = 7, checkpoint: Checkpoint = "none") -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, dim)
        self.blocks = nn.ModuleList(Block(dim, checkpoint) for _ in range(3))
        self.head = nn.Linear(dim, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if block.checkpoint in ("outside", "reentrant"):
                x = checkpoint(block, x, use_reentrant=block.checkpoint == "reentrant")
            else:
                x = block(x)
        return self.head(x)


def build(checkpoint: Checkpoint = "none", device: str = "cpu") -> Model:
    """The same weights on every call and every device."""
    torch.manual_seed(0)
    return Model(checkpoint=checkpoint).to(device)


def shard(model: Model, shard_with: Callable[..., Any] = fully_shard, **options: Any) -> Model:
    """Shard blocks and model with one engine or another."""
    for block in model.blocks:
        shard_with(block, **options)
    shard_with(model, **options)
    return model


def batches(
    num: int, rank: int, world_size: int, device: str = "cpu"
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per step the global batch's tokens, and this rank's part of them."""
    generator = torch.Generator().manual_seed(1)
    result = []
    for _ in range(num):
        tokens = torch.randint(11, (4 * world_size, 5), generator=generator).to(device)
        result.append((tokens, tokens.chunk(world_size)[rank]))
    return result


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Predict each token from those before it."""
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be sharded."""
    return tensor.full_tensor() if isinstance(tensor, (DTensor, ShardedTensor)) else tensor


def check_training_equals_unsharded(device: str, checkpoint: Checkpoint, **options: Any) -> None:
    """Losses, gradients, parameters, buffers and optimizer state, step by step."""
    plain = build(checkpoint, device)
    sharded = shard(build(checkpoint, device), **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, sharded)]
    for whole, part in batches(5, dist.get_rank(), dist.get_world_size(), device):
        expected, loss = loss_of(plain, whole), loss_of(sharded, part)
        expected.backward()
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / dist.get_world_size(), expected.detach())
        for (name, p), (_, q) in zip(
            plain.named_parameters(), sharded.named_parameters(), strict=True
        ):
            torch.testing.assert_close(full(q.grad), p.grad, msg=lambda m, n=name: f"{n}: {m}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(plain.state_dict().items(), sharded.state_dict().items(), strict=True):
        assert p[0] == q[0]
        torch.testing.assert_close(full(q[1]), p[1])
    states = [o.state_dict()["state"] for o in optimizers]
    for index, state in states[0].items():
        for name, value in state.items():
            torch.testing.assert_close(full(states[1][index][name]), value)


def check_bitwise_equal_to_torch(device: str, precise: bool) -> None:
    """Same reductions in the same order: not one bit may differ from torch's engine."""
    dtypes = {} if precise else {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    ours = shard(build(device=device), mp_policy=MixedPrecisionPolicy(**dtypes))
    theirs = shard(build(device=device), torch_fully_shard, mp_policy=TorchPolicy(**dtypes))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, theirs)]
    for _, part in batches(4, dist.get_rank(), dist.get_world_size(), device):
        losses = [loss_of(model, part) for model in (ours, theirs)]
        assert torch.equal(losses[0], losses[1])
        for loss in losses:
            loss.backward()
        for (name, p), (_, q) in zip(
            ours.named_parameters(), theirs.named_parameters(), strict=True
        ):
            assert p.placements == q.placements
            assert (p.dtype, p.shape) == (q.dtype, q.shape)
            assert torch.equal(p.to_local(), q.to_local()), name
            assert p.grad is not None
            assert torch.equal(p.grad.to_local(), q.grad.to_local()), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
