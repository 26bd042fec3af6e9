"""Train with a Muon-like optimizer: whole matrices on one rank each, so no step communicates.

    python examples/muon.py
    torchrun --nproc-per-node 2 examples/muon.py --steps 200

Muon replaces a matrix's momentum by the nearest matrix whose singular values are all one. That
needs all of the matrix at once. Sharded by rows, every step would have to gather each matrix;
`layout=Whole()` deals whole matrices to ranks instead, and each rank updates those it has.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from shoal.fsdp import fully_shard
from shoal.layout import Whole
from shoal.tensor import ShardedTensor

VOCABULARY = 32
CONTEXT = 16


class Muon(torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum, for matrices that lie on one rank each.

    Every rank makes the same calls, and does nothing for the matrices that it does not hold. State
    is placed like the parameter, so that checkpoints and other world sizes need nothing special.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        *,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        num_iterations: int = 5,
    ) -> None:
        if lr < 0 or not 0 <= momentum < 1 or weight_decay < 0 or num_iterations < 1:
            raise ValueError(
                "Muon needs lr >= 0, 0 <= momentum < 1, weight_decay >= 0, num_iterations >= 1"
            )
        options = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "num_iterations": num_iterations,
        }
        super().__init__(matrices, options)
        for group in self.param_groups:
            for matrix in group["params"]:
                _check_whole_matrix(matrix)

    @torch.no_grad()
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update every matrix that has a gradient and lies on this rank."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum"] = torch.zeros_like(matrix)
                if _own(matrix).numel() > 0:
                    self._update(group, *map(_own, (matrix, matrix.grad, state["momentum"])))
        return loss

    def _update(
        self,
        group: dict[str, float],
        weight: torch.Tensor,
        grad: torch.Tensor,
        momentum: torch.Tensor,
    ) -> None:
        momentum.lerp_(grad, 1 - group["momentum"])
        direction = orthogonalised(
            grad.lerp(momentum, group["momentum"]), int(group["num_iterations"])
        )
        # The entries of an orthogonal matrix shrink as it grows; this keeps steps of one size.
        scale = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(direction, alpha=-group["lr"] * scale)


def orthogonalised(matrix: torch.Tensor, num_iterations: int = 5) -> torch.Tensor:
    """Push all singular values of a matrix near one by Newton-Schulz iterations.

    Each iteration applies the odd polynomial a·s + b·s³ + c·s⁵ to the singular values. These
    coefficients, Muon's own, trade exactness for speed: small values grow by a = 3.44 each time,
    and end between 0.7 and 1.2.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(num_iterations):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's memory for a matrix, in the matrix's shape, or with no element."""
    if not isinstance(tensor, ShardedTensor):
        return tensor
    return tensor.local.view(tensor.shape) if tensor.local.numel() > 0 else tensor.local


def _check_whole_matrix(matrix: torch.Tensor) -> None:
    if matrix.dim() != 2:
        raise ValueError(f"Muon updates matrices, got {tuple(matrix.shape)}: give it to AdamW")
    is_whole = type(matrix) is nn.Parameter
    if isinstance(matrix, ShardedTensor):
        is_whole = matrix.placement.is_whole
    if not is_whole:
        raise ValueError(
            f"Muon needs all of a matrix on one rank, got a {type(matrix).__name__} of "
            f"{tuple(matrix.shape)} cut over ranks: use fully_shard(..., layout=Whole())"
        )


class Block(nn.Module):
    """A residual step that mixes what was seen so far into each position."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(2 * dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the block makes of each position and of the one before it."""
        here = self.norm(x)
        before = F.pad(here, (0, 0, 1, 0))[:, :-1]
        return x + self.down(F.gelu(self.up(torch.cat([here, before], dim=-1))))


class Model(nn.Module):
    """Predicts the next token of a sequence."""

    def __init__(self, dim: int = 48, num_blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_blocks))
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Give the logits of the token after each."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(*, shard: bool = True) -> Model:
    """Make the model, the same on every rank, and shard it in whole tensors."""
    torch.manual_seed(0)
    model = Model()
    if shard:
        for block in model.blocks:
            fully_shard(block, layout=Whole())
        fully_shard(model, layout=Whole())
    return model


def optimizers_for(model: Model) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside of the blocks, AdamW for everything else."""
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    taken = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in taken]
    return [Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-3, weight_decay=0.01)]


def batches(rank: int, batch_size: int = 32) -> Iterator[torch.Tensor]:
    """Sequences in which a token is the sum of the two before it, with a little noise."""
    generator = torch.Generator().manual_seed(1 + rank)
    while True:
        tokens = torch.randint(VOCABULARY, (batch_size, CONTEXT + 1), generator=generator)
        noise = torch.rand(tokens.shape, generator=generator) < 0.05
        for position in range(2, CONTEXT + 1):
            total = (tokens[:, position - 1] + tokens[:, position - 2]) % VOCABULARY
            kept = noise[:, position]
            tokens[:, position] = torch.where(kept, tokens[:, position], total)
        yield tokens


def train(model: Model, num_steps: int) -> list[float]:
    """Train, and give the loss of every step, averaged over the ranks."""
    optimizers = optimizers_for(model)
    losses: list[float] = []
    for _, tokens in zip(range(num_steps), batches(dist.get_rank()), strict=False):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def main() -> None:
    """Train for a while, and print the loss."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        losses = train(build(), steps)
        if dist.get_rank() == 0:
            for step in sorted({*range(0, steps, max(1, steps // 10)), steps - 1}):
                print(f"step {step:4d}  loss {losses[step]:.3f}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
