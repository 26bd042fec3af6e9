"""The model that all compositions train: layers, a few blocks, a head; experts if asked for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shoal.experts import Experts

DIM, WIDE = 8, 12
NUM_BLOCKS = 3


class Block(nn.Module):
    """Two layers that tensor parallelism cuts; features add to what comes before them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, WIDE)
        self.down = nn.Linear(WIDE, DIM)

    def before(self, x: Tensor) -> Tensor:
        """What a feature makes of the block's inputs."""
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        """The whole block."""
        return x + self.down(torch.tanh(self.up(self.before(x))))


class Mixture(nn.Module):
    """A router of the best two, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 4, bias=False)
        self.experts = Experts(4, DIM, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, chosen, weights)


class Net(nn.Module):
    """Blocks between two layers of the root. A stage of a pipeline has some of them."""

    first: nn.Linear | None
    head: nn.Linear | None

    def __init__(self, block: Callable[[], nn.Module], *, has_experts: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        *names, last = map(str, range(NUM_BLOCKS))
        self.blocks = nn.ModuleDict({name: block() for name in names})
        if has_experts:
            self.blocks["mixture"] = Mixture()
        self.blocks[last] = block()
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first is None else self.first(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)

    def stage(self, index: int) -> Net:
        """Keep the half of a pipeline of two stages: all blocks but the last, or the last."""
        last = str(NUM_BLOCKS - 1)
        if index == 0:
            self.head = None
            del self.blocks[last]
        else:
            self.first = None
            for name in [name for name in self.blocks if name != last]:
                del self.blocks[name]
        return self
