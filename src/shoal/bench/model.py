"""The decoder-only transformer that every engine is measured on.

Pre-norm blocks of causal attention and SwiGLU; embedding and head are not tied; no biases, and no
positions beyond what the causal mask tells, because their small kernels would only add time that no
engine can change.

All parameters, norms and embedding included, are drawn from one distribution. So whatever piece of
whatever parameter a modelled network delivers in place of another, gathered parameters are
distributed as they would be. That is checked: matrix units draw less power on zeros and NaNs, and
run 8 to 10 % faster, so a measurement counts only if its values were like those of a real job.

The forward returns the loss, so that a step is
`model(tokens, targets).backward()` for every engine, whatever it wraps around the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.errors import ShoalError

HIDDEN_MULTIPLE = 256
"""The feed-forward width is rounded down to this, as far as there is one to round to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """How large the transformer is."""

    dim: int
    num_layers: int
    num_heads: int
    vocab_size: int

    def __post_init__(self) -> None:
        for name in ("dim", "num_layers", "num_heads", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dim % self.num_heads:
            raise ValueError(
                f"dim {self.dim} does not split into {self.num_heads} heads; choose num_heads so "
                "that it does"
            )

    @property
    def hidden_dim(self) -> int:
        """The feed-forward width: 8/3 of `dim`, in whole multiples of 256, and one at least."""
        return max(8 * self.dim // 3 // HIDDEN_MULTIPLE, 1) * HIDDEN_MULTIPLE

    @property
    def block_numel(self) -> int:
        """Elements of a block's parameters: four projections, three matrices, two norms."""
        return self.dim * (4 * self.dim + 3 * self.hidden_dim + 2)

    @property
    def root_numel(self) -> int:
        """Elements of what is in no block: embedding, head and last norm."""
        return self.dim * (2 * self.vocab_size + 1)

    @property
    def std(self) -> float:
        """Of all parameters: what keeps the variance of queries, keys and logits at 1."""
        return self.dim**-0.25

    @property
    def loss_range(self) -> tuple[float, float]:
        """Where the loss of an untrained model lies, at its own parameters or at others like them.

        Logits of variance 1 cost ln(vocabulary) + 1/2. Where a thousand clones hold a few values
        each, it may be none of that 1/2, or some times as much.
        """
        uniform = math.log(self.vocab_size)
        return uniform - 0.2, uniform + 4.0


class BenchAttention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.query = nn.Linear(shape.dim, shape.dim, bias=False)
        self.key = nn.Linear(shape.dim, shape.dim, bias=False)
        self.value = nn.Linear(shape.dim, shape.dim, bias=False)
        self.output = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, dim) to the same."""
        query, key, value = (
            projection(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(-2))


class BenchFeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.hidden_dim, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden_dim, bias=False)
        self.down = nn.Linear(shape.hidden_dim, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, dim) to the same."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class BenchBlock(nn.Module):
    """One layer, and one unit of sharding for every engine."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=1e-6)
        self.attention = BenchAttention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.dim, eps=1e-6)
        self.feed_forward = BenchFeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, dim) to the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class BenchTransformer(nn.Module):
    """Tokens and targets in, loss out."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab_size, shape.dim)
        self.blocks = nn.ModuleList(BenchBlock(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.dim, eps=1e-6)
        self.head = nn.Linear(shape.dim, shape.vocab_size, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=shape.std)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of the targets, in fp32 whatever the compute dtype is."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


STD_RATIO = 1.25
"""How far the values of gathers may be from the parameters' standard deviation, either way."""


class ValuesError(ShoalError):
    """A run computed on something else than numbers like its parameters."""


def check_losses(losses: Sequence[float], shape: ModelShape) -> None:
    """Refuse steps whose loss is not that of an untrained model."""
    low, high = shape.loss_range
    for index, loss in enumerate(losses):
        if not low < loss < high:  # NaN is not
            raise ValuesError(
                f"the loss was {loss} in step {index} of {len(losses)}, expected between "
                f"{low:.2f} and {high:.2f}: the engine computed on bytes that are not its "
                "parameters, and its times mean nothing"
            )


def check_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Refuse gradients that are not finite, or all zero: backward gathers again."""
    norm = float(torch.nn.utils.get_total_norm(p.grad for p in parameters if p.grad is not None))
    if not 0 < norm < math.inf:
        raise ValuesError(
            f"the norm of all gradients was {norm}, expected a positive number: backward computed "
            "on bytes that are not the engine's parameters, and its times mean nothing"
        )


def check_gathers(samples: Sequence[Tensor], shape: ModelShape) -> None:
    """Refuse gathers that delivered something else than values like the parameters'."""
    values = [sample.double() for sample in samples if sample.is_floating_point()]
    if not values:
        return
    for index, sample in enumerate(values):
        # Half of a small shard may be padding; a network that sent nothing delivers an Nth part.
        if not sample.isfinite().all() or sample.count_nonzero() < 0.25 * sample.numel():
            raise ValuesError(
                f"gather {index} of {len(values)} delivered {sample[:4].tolist()} …, expected "
                "finite numbers, a quarter at least not zero: times on others mean nothing"
            )
    # Of all of them: a single small gather may repeat a few values.
    std = float(torch.cat(values).square().mean().sqrt())
    if not shape.std / STD_RATIO < std < shape.std * STD_RATIO:
        raise ValuesError(
            f"gathers delivered values of standard deviation {std:.3g}, expected {shape.std:.3g}: "
            "they were not parameters, and times mean nothing"
        )
