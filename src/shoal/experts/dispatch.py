"""Rows of tokens on their way: sorted by expert, sent to the ranks that hold these, and back.

    rows of this rank, by expert  →  all-to-all, as many as there are  →  rows of its experts

How many rows go where is known when the router has chosen, so the numbers travel first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shoal.comm.transport import Transport


class _Exchange(torch.autograd.Function):
    """Sends rows to ranks; gradients go the way back, and gradients of gradients there again."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        transport: Transport,
    ) -> torch.Tensor:
        ctx.way_back = received, sent, transport
        return _exchanged(rows, sent, received, transport)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, None, None, None]:
        return _Exchange.apply(grad, *ctx.way_back), None, None, None


def _exchanged(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], transport: Transport
) -> torch.Tensor:
    width = rows.shape[1]
    output = rows.new_empty(sum(received), width)
    transport.all_to_all(
        output.view(-1),
        rows.contiguous().view(-1),
        [num * width for num in received],
        [num * width for num in sent],
        reason="the exchange of tokens between experts",
    ).wait()
    return output


class Dispatch:
    """Where the rows of one call go: made once by all ranks, used on the way there and back."""

    def __init__(
        self, experts: torch.Tensor, num_experts: int, transport: Transport | None = None
    ) -> None:
        """`experts` has the expert of every row of this rank, in any order."""
        self._transport = transport
        self._num_rows = len(experts)
        self._order = torch.argsort(experts, stable=True)
        counts = torch.bincount(experts, minlength=num_experts)
        if transport is None:
            self.sizes: list[int] = counts.tolist()
            """How many rows each expert of this rank gets."""
            return
        ranks = transport.size
        arriving = torch.empty_like(counts)
        transport.all_to_all(arriving, counts, reason="the numbers of tokens for experts").wait()
        by_source = arriving.view(ranks, -1)
        both = torch.cat([counts.view(ranks, -1).sum(1), by_source.sum(1), by_source.sum(0)])
        numbers: list[int] = both.tolist()  # the host waits once
        self._sent, self._received = numbers[:ranks], numbers[ranks : 2 * ranks]
        self.sizes = numbers[2 * ranks :]
        # They arrive by source, then by expert; experts want theirs in a row.
        num_local = by_source.shape[1]
        kinds = torch.arange(num_local, device=experts.device).repeat(ranks)
        self._arrival = torch.argsort(kinds.repeat_interleave(arriving), stable=True)

    def send(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of this rank's experts, one expert after the other. Collective."""
        rows = rows[self._order]
        if self._transport is None:
            return rows
        arrived = _Exchange.apply(rows, self._sent, self._received, self._transport)
        return arrived[self._arrival]

    def give_back(self, rows: torch.Tensor) -> torch.Tensor:
        """What experts have made of the rows, in the order of `experts`. Collective."""
        if self._transport is not None:
            by_source = torch.empty_like(rows).index_copy(0, self._arrival, rows)
            rows = _Exchange.apply(by_source, self._received, self._sent, self._transport)
        return torch.empty_like(rows).index_copy(0, self._order, rows)
