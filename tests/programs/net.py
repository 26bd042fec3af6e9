"""The model of random programs: units that a forward can go through in several ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

DIM = 6
NUM_CELLS = 3

Oddity = Literal["scalar", "transposed", "complex", "sparse"]
"""What a cell has that others have not: a 0-d gain, a weight that is not contiguous, a complex
parameter, an embedding with sparse gradients."""


class PlannedError(Exception):
    """Raised by a program on purpose."""


class Fuse(torch.autograd.Function):
    """Lets a tensor through; raises when backward comes to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise PlannedError("in backward")


class Layer(nn.Linear):
    """Computes in its input's dtype, as the sharded one does with `param_dtype`."""

    def forward(self, input: Tensor) -> Tensor:
        assert self.bias is not None
        dtype = input.dtype
        return functional.linear(input, self.weight.to(dtype), self.bias.to(dtype))


class Cell(nn.Module):
    """A unit: rows that no number of ranks divides, and a gain shorter than the world."""

    def __init__(self, kind: str, oddities: Sequence[Oddity] = ()) -> None:
        super().__init__()
        self.kind = kind
        self.up = Layer(DIM, 7)
        self.down = Layer(7, DIM)
        self.gain = nn.Parameter(torch.ones(() if "scalar" in oddities else 1))
        if "transposed" in oddities:
            for layer in (self.up, self.down):
                layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
        self.turn = self.table = None
        if "complex" in oddities:
            self.turn = nn.Parameter(torch.full((3,), 1 + 1j, dtype=torch.cdouble))
        if "sparse" in oddities:
            self.table = nn.Embedding(5, DIM, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "recomputed":
            return checkpoint(self._compute, x, use_reentrant=False)
        return self._compute(self._compute(x)) if self.kind == "twice" else self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(x)))
        if self.turn is not None:
            z = x[..., :3] * self.turn.to(torch.promote_types(x.dtype, torch.cfloat))
            y = y + (z.real - 0.3 * z.imag).sin().sum(-1, keepdim=True)
        if self.table is not None:
            y = y + self.table((x[:, 0] > 0).long()).to(x.dtype)
        return x + self.gain.to(x.dtype) * y


@dataclass(frozen=True, slots=True)
class Way:
    """Through which cells a forward goes, and where it is cut short."""

    is_parallel: bool = False
    """Whether cells read one tensor and their outputs are added, each rank its own choice."""
    num_cells: int = NUM_CELLS
    """After how many cells a chain ends."""
    uses: tuple[tuple[bool, ...], ...] = ()
    """In parallel: which outputs each rank uses."""
    detaches_at: int | None = None
    """After which cell a chain is cut off, so that no backward comes to it."""
    is_alone: bool = False
    """Whether its last cell is called by itself, and not the model."""
    fails_at: int | None = None
    fails_in_backward: bool = False

    def run(self, model: Any, x: Tensor, rank: int = 0) -> Tensor:
        """Go it."""
        if self.is_alone and not self.is_parallel:
            return model.cells[self.num_cells - 1](x)
        return model(x, self, rank)


class Net(nn.Module):
    """Cells between two layers that belong to the root."""

    def __init__(
        self, kinds: Sequence[str], oddities: Sequence[Oddity] = (), *, is_tied: bool = False
    ) -> None:
        super().__init__()
        self.is_tied = is_tied
        self.first = Layer(DIM, DIM)
        # The last cell is like all others: a tied weight of its is one of the first's.
        self.cells = nn.ModuleList(
            Cell(kind, oddities if index < len(kinds) - 1 else ())
            for index, kind in enumerate(kinds)
        )
        self.head = Layer(DIM, 3)
        self.tie()

    def tie(self) -> None:
        """Let the first and the last cell have one weight, as libraries do after a load."""
        if self.is_tied:
            self.cells[-1].up.weight = self.cells[0].up.weight  # pyright: ignore

    def forward(self, x: Tensor, way: Way = Way(), rank: int = 0) -> Tensor:  # noqa: B008
        x = self.first(x)
        if way.is_parallel:
            outputs = [cell(x) for cell in self.cells]
            used = [one for one, uses in zip(outputs, way.uses[rank], strict=True) if uses]
            return self.head(torch.stack([x, *used]).sum(0))
        for index, cell in enumerate(self.cells[: way.num_cells]):
            x = cell(x)
            if way.detaches_at == index:
                x = x.detach()
            if way.fails_at == index:
                if not way.fails_in_backward:
                    raise PlannedError("in forward")
                x = Fuse.apply(x if x.requires_grad else x.detach().requires_grad_())
        return self.head(x)


def loss_of(output: Tensor, _: object = None) -> Tensor:
    """A mean over samples, so that the mean over ranks is the loss of the whole batch."""
    return output.square().mean()
