"""Small models, one for each thing that a compiled engine must keep as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCAB, DIM = 13, 8


class Plain(nn.Module):
    """Two layers, whose sizes no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM + 1), nn.Linear(2 * DIM + 1, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Attending(Plain):
    """Attention before the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(DIM, 3 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(functional.layer_norm(x, (DIM,))).chunk(3, dim=-1)
        return super().forward(x + functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class Adapted(Plain):
    """Frozen layers with a low-rank correction that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(DIM, 2) / 4)
        self.b = nn.Parameter(torch.zeros(2, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.a @ self.b


class Recomputed(Plain):
    """Activations are computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Dropping(Plain):
    """Random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(x), 0.2, training=self.training)


class Normed(Plain):
    """Buffers that forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x.flatten(0, 1)).view(x.shape))


class Model(nn.Module):
    """An embedding, two blocks, and a head, which may share the embedding's weight."""

    def __init__(self, block: Callable[[], nn.Module], *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


CASES: dict[str, Callable[[], Model]] = {
    "mlp": lambda: Model(Plain),
    "tied transformer": lambda: Model(Attending, tied=True),
    "frozen with adapters": lambda: Model(Adapted),
    "recomputed": lambda: Model(Recomputed),
    "dropout": lambda: Model(Dropping),
    "batch norm": lambda: Model(Normed),
}

QUICK = ("tied transformer", "batch norm")
SAMPLED = [case if case in QUICK else pytest.param(case, marks=pytest.mark.soak) for case in CASES]
"""All cases, of which most take part in soak runs only: each is a compilation."""


def build(case: str) -> Model:
    """The same weights on every call."""
    torch.manual_seed(0)
    return CASES[case]()


def batches(num_steps: int) -> Iterator[Tensor]:
    """Tokens of this rank, step by step; random numbers in a step are the same for all engines."""
    for step in range(num_steps):
        torch.manual_seed(100 * step + dist.get_rank())
        yield torch.randint(VOCAB, (3, 4))


def loss_of(run: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """The loss of guessing each token from itself."""
    return functional.cross_entropy(run(tokens).float().flatten(0, 1), tokens.flatten())


def trained(model: nn.Module, run: Any = None, num_steps: int = 20) -> dict[str, Tensor]:
    """Parameters, last gradients and buffers after some steps, whole, by name."""
    run = model if run is None else run
    trains = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trains, lr=0.05, momentum=0.9)
    for tokens in batches(num_steps):
        optimizer.zero_grad()
        loss_of(run, tokens).backward()
        optimizer.step()
    state: dict[str, Tensor] = dict(model.named_buffers())
    for name, parameter in model.named_parameters():
        state[name] = parameter.detach()
        if parameter.grad is not None:
            state[f"{name}.grad"] = parameter.grad
    return {name.removeprefix("module."): _whole(one) for name, one in state.items()}


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], *, exact: bool = True) -> None:
    """The same names, and the same numbers: to the bit, or as near as another order of sums."""
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        if exact:
            assert torch.equal(one, theirs[name]), name
        else:
            torch.testing.assert_close(one, theirs[name], rtol=2e-2, atol=2e-3, msg=name)
