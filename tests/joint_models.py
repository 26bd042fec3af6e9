"""Models whose joint graphs the partitioners are tried on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A transformer block with dropout."""

    def __init__(self, dim: int = 32, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, dim)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)
    )


def chain() -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.2), nn.SiLU(), nn.LayerNorm(32), nn.Tanh()
    )


def convolutions() -> nn.Module:
    def norm() -> nn.Module:
        return nn.BatchNorm2d(8, track_running_stats=False)

    return nn.Sequential(
        nn.Conv2d(3, 8, 3), norm(), nn.ReLU(), nn.Conv2d(8, 8, 3), norm(), nn.ReLU()
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (2, 8, 32)),
    "block": (Block, (2, 8, 32)),
    "two blocks": (lambda: nn.Sequential(Block(), Block()), (2, 8, 32)),
    "chain": (chain, (2, 8, 32)),
    "convolutions": (convolutions, (2, 3, 12, 12)),
}


def as_function(name: str) -> tuple[Callable[..., Any], list[Tensor]]:
    """A model as a function of its input and its parameters, and some to call it with."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make()
    names = [one for one, _ in model.named_parameters()]

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(model, given, (x,))

    return function, [torch.randn(shape, requires_grad=True), *model.parameters()]
