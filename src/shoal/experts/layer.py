"""`Experts`: feed-forward networks of one shape, each for the tokens that a router gives it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from shoal.comm.transport import Transport
from shoal.errors import UsageError
from shoal.experts.dispatch import Dispatch

_ALIGNED_BYTES = 16
"""What grouped matrix products on CUDA ask of every row."""


class Experts(nn.Module):
    """SwiGLU networks, of which each token goes through some.

    `experts(tokens, chosen, weights)` takes tokens of any leading shape, and for each of them the
    numbers of its experts and their weights; it returns the weighted sum of what they say. The
    router, and any loss that balances it, is the caller's. Before `shard_experts` every rank holds
    all experts.
    """

    def __init__(
        self,
        num_experts: int,
        dim: int,
        hidden_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if min(num_experts, dim, hidden_dim) < 1:
            raise UsageError(
                "Experts needs at least one expert, dim and hidden_dim, got "
                f"{num_experts}, {dim} and {hidden_dim}"
            )
        self.num_experts = num_experts
        self.transport: Transport | None = None
        """The ranks that experts are dealt to; `shard_experts` sets it."""

        def matrices(num_in: int, num_out: int) -> nn.Parameter:
            return nn.Parameter(
                torch.empty(num_experts, num_in, num_out, device=device, dtype=dtype)
            )

        self.gate = matrices(dim, hidden_dim)
        self.up = matrices(dim, hidden_dim)
        self.down = matrices(hidden_dim, dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as `nn.Linear` does."""
        for parameter in self.parameters():
            bound = 1 / math.sqrt(parameter.shape[1])
            nn.init.uniform_(parameter, -bound, bound)

    def extra_repr(self) -> str:
        """What printing a model shows."""
        ranks = "" if self.transport is None else f", on {self.transport.size} ranks"
        return f"{self.num_experts} of {self.gate.shape[1]} to {self.gate.shape[2]}{ranks}"

    def forward(
        self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of what the chosen experts make of each token."""
        rows = tokens.reshape(-1, tokens.shape[-1])
        if chosen.shape != weights.shape or chosen.shape[:-1] != tokens.shape[:-1]:
            raise UsageError(
                "Experts takes tokens [..., dim], and for each of them chosen experts and weights "
                f"[..., k]; got {tuple(tokens.shape)}, {tuple(chosen.shape)} and "
                f"{tuple(weights.shape)}"
            )
        per_token = chosen.shape[-1]
        dispatch = Dispatch(chosen.reshape(-1), self.num_experts, self.transport)
        arrived = dispatch.send(rows.repeat_interleave(per_token, 0))
        gate, up, down = (_local(one) for one in (self.gate, self.up, self.down))
        gated = F.silu(grouped_matmul(arrived, gate, dispatch.sizes))
        made = grouped_matmul(
            gated * grouped_matmul(arrived, up, dispatch.sizes), down, dispatch.sizes
        )
        back = dispatch.give_back(made).view(-1, per_token, rows.shape[1])
        summed = (back * weights.reshape(-1, per_token, 1).to(back.dtype)).sum(1)
        return summed.view(tokens.shape)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """The matrices of this rank's experts."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def grouped_matmul(
    rows: torch.Tensor, matrices: torch.Tensor, sizes: Sequence[int]
) -> torch.Tensor:
    """Multiply runs of rows, of these sizes, by one matrix each.

    A matrix without rows gets a gradient of zeros: all ranks reduce the same parameters.
    """
    grouped = getattr(F, "grouped_mm", None)
    if grouped is not None and _fits_grouped(rows, matrices):
        ends = torch.tensor(sizes, device=rows.device).cumsum(0, dtype=torch.int32)
        return grouped(rows, matrices, offs=ends)
    runs = zip(rows.split(list(sizes)), matrices.unbind(), strict=True)
    return torch.cat([run @ matrix for run, matrix in runs])


def _fits_grouped(rows: torch.Tensor, matrices: torch.Tensor) -> bool:
    """Whether one kernel multiplies them all."""
    widths = (matrices.shape[1] * rows.itemsize, matrices.shape[2] * rows.itemsize)
    return (
        rows.is_cuda
        and rows.dtype is torch.bfloat16
        and matrices.dtype is torch.bfloat16
        and len(rows) > 0
        and all(width % _ALIGNED_BYTES == 0 for width in widths)
    )
