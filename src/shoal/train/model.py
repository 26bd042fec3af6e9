"""The model: a decoder-only transformer, plain PyTorch that knows nothing of sharding."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.train.config import ModelConfig
from shoal.train.data import VOCABULARY

_ROTARY_BASE = 10_000.0
_INIT_STD = 0.02


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """Mix each position of (batch, position, dim) with those before it."""
        batch, length, dim = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(
            _rotate(query, rotary), _rotate(key, rotary), value, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


class FeedForward(nn.Module):
    """SwiGLU: one linear map gates another."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, 2 * config.feed_forward_dim, bias=False)
        self.down = nn.Linear(config.feed_forward_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position on its own."""
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class TransformerBlock(nn.Module):
    """Attention, then feed-forward, each on a normalised residual stream."""

    def __init__(self, config: ModelConfig, *, activation_checkpointing: bool) -> None:
        super().__init__()
        self.activation_checkpointing = activation_checkpointing
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """Add what this block has to say to the residual stream."""
        if self.activation_checkpointing and torch.is_grad_enabled():
            # Inside `forward`, so that a sharded block is one module that runs once.
            return checkpoint(self._forward, x, rotary, use_reentrant=False)
        return self._forward(x, rotary)

    def _forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """Bytes in, scores of the next byte out."""

    rotary: Tensor

    def __init__(self, config: ModelConfig, *, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.blocks = nn.ModuleList(
            TransformerBlock(config, activation_checkpointing=activation_checkpointing)
            for _ in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, VOCABULARY, bias=False)
        rotary = _rotary_table(config.context, config.dim // config.heads)
        self.register_buffer("rotary", rotary, persistent=False)
        self._initialise(config.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Score the byte after each of `tokens`: (batch, position) to (batch, position, 256)."""
        x = self.embedding(tokens)
        rotary = self.rotary[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x, rotary)
        return self.head(self.norm(x))

    @torch.no_grad()
    def _initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue  # the norms start at one
            std = _INIT_STD
            if name.endswith(("attention.out.weight", "feed_forward.down.weight")):
                # Each block adds twice to the residual stream; its variance shall not grow.
                std /= math.sqrt(2 * layers)
            parameter.normal_(std=std)


def scores(model: nn.Module, tokens: Tensor) -> Tensor:
    """Score the token after each of `tokens`; models of `transformers` return more than that."""
    output: Any = model(tokens)
    return output if isinstance(output, Tensor) else output.logits


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats per token, computed in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _rotary_table(length: int, head_dim: int) -> Tensor:
    """Return the cosine and sine of each position's angles: (2, position, head_dim / 2)."""
    frequencies = _ROTARY_BASE ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def _rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn the two halves of each head against each other by the angle of their position."""
    cos, sin = rotary.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
