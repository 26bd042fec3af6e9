"""Gathers and reduce-scatters on gloo, both by its all-to-all, which is its fastest collective.

gloo's own all-gather goes around a ring into memory of its own, from which it is copied; its own
reduce-scatter reduces the whole input on every rank and keeps a piece. An all-to-all goes straight
from rank to rank. Measured from 10 KB to 4 MB on 2 and 4 ranks, a gather takes 0.7 to 0.95 and a
reduce-scatter 0.4 to 0.7 of the host time that gloo's own take. Reducing after the exchange also
fixes the order of summation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from shoal._torch import collectives
from shoal.comm.calls import Reduction
from shoal.comm.pending import Started
from shoal.comm.reduction import reduce_in_order
from shoal.comm.scratch import Scratch

Swap = Callable[[Tensor, Tensor], dist.Work]
"""Starts a collective of equal pieces: output, input."""

# Of the process, since the groups of all units take turns in using it.
_scratch = Scratch()


def start_gather(swap: Swap, gather: Swap, output: Tensor, input: Tensor, size: int) -> Started:
    """Start a gather: every rank sends the same piece to all.

    `gather` is the group's own, which whoever counts collectives is shown.
    """
    staged = _scratch.take(output)
    staged.view(size, -1).copy_(input.data)
    work = collectives.shown_as(gather, output, input, lambda: swap(output, staged))
    return work, lambda: _scratch.give_back(staged)


def start_reduce_scatter(
    swap: Swap, scatter: Swap, output: Tensor, input: Tensor, op: Reduction, size: int
) -> Started:
    """Start a reduce-scatter: exchange pieces; reduce them in rank order when they are there.

    `scatter` is the group's own, which whoever counts collectives is shown.
    """
    received = _scratch.take(input)
    work = collectives.shown_as(scatter, output, input, lambda: swap(received, input))

    def finish() -> None:
        reduce_in_order(received.chunk(size), op, output)
        _scratch.give_back(received)

    return work, finish
