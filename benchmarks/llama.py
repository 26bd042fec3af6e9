"""Llama 3 in plain torch, by its published shapes: a file for `shoal plan`.

shoal plan benchmarks/llama.py --world 64 --checkpointing
LLAMA=70B shoal plan benchmarks/llama.py --fit 80GB --world 64 --global-batch 4M
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, HEAD, KEYS = 128256, 128, 8


@dataclass(frozen=True)
class Shape:
    """How large one of them is."""

    dim: int
    hidden: int
    num_layers: int


SHAPES = {
    "8B": Shape(4096, 14336, 32),
    "70B": Shape(8192, 28672, 80),
    "405B": Shape(16384, 53248, 126),
}
precision = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


class Attention(nn.Module):
    """Grouped queries, rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.query = nn.Linear(shape.dim, shape.dim, bias=False)
        self.key = nn.Linear(shape.dim, KEYS * HEAD, bias=False)
        self.value = nn.Linear(shape.dim, KEYS * HEAD, bias=False)
        self.output = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, sequence, dim) to the same."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        query, key = (_rotated(one, cos, sin) for one in (query, key))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(-2))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * sin


class Block(nn.Module):
    """One layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.attention = Attention(shape)
        self.norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, sequence, dim) to the same."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        wide = self.norm(x)
        return x + self.down(F.silu(self.gate(wide)) * self.up(wide))


class Llama(nn.Module):
    """Tokens and targets in, loss out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.head = nn.Linear(shape.dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy, in fp32."""
        x = self.embedding(tokens)
        at = torch.arange(tokens.shape[1], device=tokens.device)
        rates = 500000.0 ** (torch.arange(0, HEAD, 2, device=tokens.device) / -HEAD)
        angles = torch.outer(at, rates).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def model() -> nn.Module:
    """The one that the variable LLAMA names, else 8B."""
    return Llama(SHAPES[os.environ.get("LLAMA", "8B")])


def inputs(batch: int = 1, sequence: int = 8192) -> tuple[Tensor, Tensor]:
    """Tokens, and the targets."""
    tokens = torch.zeros(batch, sequence, dtype=torch.long)
    return tokens, tokens


def units(model: Llama) -> list[nn.Module]:
    """A unit for each block; the model is the last one."""
    return list(model.blocks)
