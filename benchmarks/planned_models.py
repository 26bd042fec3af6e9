"""Eight architectures to forecast and to rehearse, each in a size for one GPU and in a tiny one.

No shape depends on values: experts choose their tokens, so that each takes as many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.bench.model import BenchTransformer, ModelShape
from shoal.plan import Workload


class Experts(nn.Module):
    """A feed-forward layer of experts; each takes the tokens that suit it best."""

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.up = nn.Parameter(torch.empty(num_experts, dim, 2 * dim))
        self.down = nn.Parameter(torch.empty(num_experts, 2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, dim) to the same."""
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        num_each = 2 * tokens.shape[0] // scores.shape[1]
        weights, chosen = scores.topk(num_each, dim=0)
        taken = tokens[chosen.t()]
        made = torch.bmm(F.gelu(torch.bmm(taken, self.up)), self.down) * weights.t().unsqueeze(-1)
        return (
            torch.zeros_like(tokens)
            .index_add(0, chosen.t().flatten(), made.flatten(0, 1))
            .view_as(x)
        )


class ExpertBlock(nn.Module):
    """Causal attention and experts."""

    def __init__(self, dim: int, num_heads: int, num_experts: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.first, self.second = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.mixing, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.experts = Experts(dim, num_experts)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, dim) to the same."""
        parts = self.mixing(self.first(x)).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        query, key, value = (one.transpose(1, 2) for one in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.experts(self.second(x))


class Language(nn.Module):
    """Tokens and targets in, loss out; the head may be the embedding."""

    def __init__(
        self, dim: int, vocabulary: int, blocks: list[nn.Module], *, is_tied: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _encoder_layer(dim: int, dropout: float = 0.1) -> nn.Module:
    return nn.TransformerEncoderLayer(
        dim, dim // 64, 4 * dim, dropout, "gelu", batch_first=True, norm_first=True
    )


class Vision(nn.Module):
    """Patches, a token for the class, positions, encoder layers."""

    def __init__(self, dim: int, num_layers: int, size: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 16, 16)
        self.token = nn.Parameter(torch.empty(1, 1, dim))
        self.positions = nn.Parameter(torch.empty(1, (size // 16) ** 2 + 1, dim))
        self.blocks = nn.ModuleList(_encoder_layer(dim, 0.0) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """A scalar of the classes' logits."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0])).float().logsumexp(-1).mean()


class Convolutions(nn.Module):
    """Two convolutions with norms, and what leads around them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first, self.second = (nn.GroupNorm(8, one) for one in (before, after))
        self.one = nn.Conv2d(before, after, 3, padding=1)
        self.two = nn.Conv2d(after, after, 3, padding=1)
        self.around = nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Images of some channels to images of others."""
        made = self.two(F.silu(self.second(self.one(F.silu(self.first(x))))))
        return made + self.around(x)


class Diffusion(nn.Module):
    """Down and up again, with bridges between images of one size."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        widths = [channels, 2 * channels, 4 * channels]
        self.start = nn.Conv2d(3, channels, 3, padding=1)
        pairs = [(channels, channels), *pairwise(widths)]
        self.blocks = nn.ModuleList(Convolutions(*pair) for pair in pairs)
        up = [(4 * channels + 4 * channels, 2 * channels), (4 * channels, channels)]
        self.blocks.extend(Convolutions(*pair) for pair in up)
        self.last = Convolutions(2 * channels, channels)
        self.end = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """The mean square of what comes out."""
        x = self.start(images)
        kept: list[Tensor] = []
        down, up = self.blocks[:3], [*self.blocks[3:], self.last]
        for block in down:
            x = block(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        for block in up:
            x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, kept.pop()], dim=1))
        return self.end(x).float().square().mean()


class Adapted(nn.Module):
    """A frozen linear layer and a trained product of two thin ones."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """What the base gives, and the correction."""
        return self.base(x) + self.up(self.down(x))


def _adapted(shape: ModelShape, rank: int) -> nn.Module:
    model = BenchTransformer(shape).requires_grad_(False)
    for block in model.blocks:
        for name in ("query", "value"):
            attention = block.attention
            setattr(attention, name, Adapted(getattr(attention, name), rank))
    return model


@dataclass(frozen=True)
class Architecture:
    """A model and its inputs, in two sizes: for a GPU, and tiny."""

    name: str
    model: Callable[[bool], nn.Module]
    inputs: Callable[[bool], Any]

    def workload(self, is_tiny: bool) -> Workload:
        """What is trained; the members of `blocks` are units."""
        return Workload(
            model=lambda: self.model(is_tiny),
            inputs=lambda: self.inputs(is_tiny),
            units=lambda model: list(model.blocks),
            loss=lambda output: output if output.dim() == 0 else output.float().square().mean(),
        )


def _tokens(batch: int, length: int, tiny: tuple[int, int]) -> Callable[[bool], Any]:
    def made(is_tiny: bool) -> tuple[Tensor, Tensor]:
        tokens = torch.zeros(tiny if is_tiny else (batch, length), dtype=torch.long)
        return tokens, tokens.clone()

    return made


def _floats(shape: tuple[int, ...], tiny: tuple[int, ...]) -> Callable[[bool], Any]:
    return lambda is_tiny: torch.zeros(tiny if is_tiny else shape)


def _shape(dim: int, num_layers: int, vocabulary: int) -> ModelShape:
    return ModelShape(
        dim=dim, num_layers=num_layers, num_heads=max(dim // 128, 2), vocab_size=vocabulary
    )


_TINY = _shape(64, 3, 128)
_WORDS = _tokens(2, 2048, (2, 32))


class _Encoder(nn.Module):
    def __init__(self, dim: int, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_encoder_layer(dim) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def _experts(dim: int, num_layers: int, num_experts: int, vocabulary: int) -> nn.Module:
    blocks: list[nn.Module] = [
        ExpertBlock(dim, max(dim // 128, 2), num_experts) for _ in range(num_layers)
    ]
    return Language(dim, vocabulary, blocks, is_tied=False)


def _tied(dim: int, num_layers: int, vocabulary: int) -> nn.Module:
    blocks: list[nn.Module] = list(BenchTransformer(_shape(dim, num_layers, 8)).blocks)
    return Language(dim, vocabulary, blocks, is_tied=True)


ARCHITECTURES = {
    one.name: one
    for one in (
        Architecture(
            "dense",
            lambda tiny: BenchTransformer(_TINY if tiny else _shape(2048, 16, 32000)),
            _WORDS,
        ),
        Architecture(
            "experts",
            lambda tiny: _experts(64, 3, 4, 128) if tiny else _experts(1024, 8, 16, 32000),
            _WORDS,
        ),
        Architecture(
            "encoder",
            lambda tiny: _Encoder(*((64, 3) if tiny else (1024, 24))),
            _floats((16, 512, 1024), (2, 32, 64)),
        ),
        Architecture(
            "vision",
            lambda tiny: Vision(*((64, 3, 32) if tiny else (1280, 32, 224))),
            _floats((32, 3, 224, 224), (2, 3, 32, 32)),
        ),
        Architecture(
            "diffusion",
            lambda tiny: Diffusion(8 if tiny else 256),
            _floats((8, 3, 128, 128), (2, 3, 16, 16)),
        ),
        Architecture(
            "adapters",
            lambda tiny: _adapted(_TINY, 4) if tiny else _adapted(_shape(2048, 16, 32000), 16),
            _WORDS,
        ),
        Architecture(
            "tied", lambda tiny: _tied(64, 3, 128) if tiny else _tied(1536, 16, 50304), _WORDS
        ),
        Architecture(
            "small",
            lambda tiny: BenchTransformer(_TINY if tiny else _shape(512, 24, 32000)),
            _tokens(1, 512, (1, 16)),
        ),
    )
}
