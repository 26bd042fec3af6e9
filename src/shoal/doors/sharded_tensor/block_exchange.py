"""Blocks of a sharded matrix, and tensors that ranks exchange for them; autograd follows both.

held_by_rank   the blocks of each rank
own_blocks     this rank's blocks, which send their gradient where it belongs
announce       a few numbers for each rank; a rank's mistake travels along, so that all ranks raise
Swaps          flat tensors, some for each rank; in the backward their gradients go the other way
place          what came back, added into the blocks of one matrix
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shoal.comm.messages import carrier_device
from shoal.comm.transport import Transport
from shoal.errors import UsageError
from shoal.layout.region import Region
from shoal.tensor.base import parts_of
from shoal.tensor.reductions import accumulation_dtype
from shoal.tensor.sharded import ShardedTensor, like_each

MatrixBlock: TypeAlias = tuple[slice, slice]
"""Rows and columns of a matrix."""
_FINE = 0
_ERRORS = (NotImplementedError, TypeError, ValueError, RuntimeError)
"""What a rank tells of its error: its number is the place in this list, counted from 1."""


def check_matrix(weight: object) -> None:
    """Raise unless a layer's weight is a sharded matrix."""
    if not isinstance(weight, ShardedTensor):
        raise TypeError(f"weight needs to be ShardedTensor, got {type(weight)}")
    if weight.dim() != 2:
        raise ValueError(f"Weight needs to have exactly 2 dims, got {weight.dim()}")


def held_by_rank(matrix: ShardedTensor) -> list[tuple[Region, ...]]:
    """For each rank of the group the blocks that it holds, in its order."""
    placement = matrix.placement
    if not isinstance(placement.group, ProcessGroup):
        raise UsageError(
            f"a sharded matrix of {placement.shape} is used by the ranks of its process group; "
            "this rank is in none"
        )
    return [placement.regions_of(rank) for rank in range(placement.group.size())]


def own_blocks(matrix: ShardedTensor) -> list[tuple[Region, Tensor]]:
    """This rank's blocks; what is computed from them sends its gradient where it belongs.

    That is the shards where they are tensors in their own right. The matrix itself gets it where it
    alone is known to autograd: a result of operations, or the parameter of a layout.
    """
    locals_ = matrix.locals
    if (
        torch.is_grad_enabled()
        and matrix.requires_grad
        and not any(local.requires_grad for local in locals_)
    ):
        locals_ = _Locals.apply(matrix)
    return parts_of(matrix.placement, locals_)


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether autograd records what is computed from these; the same answer on every rank."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class _Locals(torch.autograd.Function):
    """A sharded tensor's local tensors; their gradients are the local tensors of its gradient."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, tensor: ShardedTensor
    ) -> tuple[Tensor, ...]:
        ctx.example = tensor.detach()
        return tuple(local.view_as(local) for local in tensor.locals)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> ShardedTensor:
        return like_each(ctx.example, [gradient.contiguous() for gradient in gradients])


def announce(
    numbers: Sequence[Sequence[int]],
    problem: Exception | None,
    group: ProcessGroup,
    device: torch.device,
    *,
    reason: str,
) -> list[list[int]]:
    """Send `numbers[r]` to each rank r, and give what each rank sent here.

    Each rank gets as many numbers from the others as from itself. `problem` is why this rank cannot
    go on: it is raised here, and an error of the same type on the others, of several ranks' errors
    that of the first.
    """
    status = _FINE if problem is None else _number_of(problem)
    rows = [[status, *row] for row in numbers]
    where = carrier_device(group, device)
    sent = torch.tensor([*itertools.chain(*rows)], dtype=torch.int64, device=where)
    width = len(rows[group.rank()])
    received = sent.new_empty(group.size() * width)
    Transport(group).all_to_all(
        received, sent, [width] * group.size(), [len(row) for row in rows], reason=reason
    ).wait()
    told: list[list[int]] = received.view(group.size(), width).tolist()
    if problem is not None:
        raise problem
    wrong = {rank: status for rank, (status, *_) in enumerate(told) if status != _FINE}
    if wrong:
        error = _ERRORS[next(iter(wrong.values())) - 1]
        raise error(f"{reason}: the arguments on ranks {[*wrong]} of the group are not valid")
    return [row for _, *row in told]


def _number_of(problem: Exception) -> int:
    """The first type in `_ERRORS` that fits; the last one where none does."""
    fits = (number for number, kind in enumerate(_ERRORS, 1) if isinstance(problem, kind))
    return next(fits, len(_ERRORS))


class Swaps:
    """Swaps of tensors between all ranks of a group, one after another.

    In the backward every rank takes part in all of them, in the opposite order, also a rank that
    makes nothing of what it receives: each swap leaves a thread that the next one holds on to.
    """

    __slots__ = ("_group", "_reason", "_thread")

    def __init__(self, group: ProcessGroup, reason: str) -> None:
        self._group = group
        self._reason = reason
        self._thread = torch.empty(0)

    def swap(
        self,
        pieces: Sequence[Sequence[Tensor]],
        numels: Sequence[Sequence[int]],
        like: Tensor,
        *,
        needs_gradient: bool = False,
    ) -> list[list[Tensor]]:
        """Send the tensors in `pieces[r]` to each rank r; give what each rank sent here, flat.

        `numels[r]` are the sizes of what rank r sends; `like` has the device and dtype of all.
        """
        if needs_gradient and not self._thread.requires_grad:
            self._thread = torch.empty(0, requires_grad=True)
        flat = torch.cat(
            [like.new_empty(0), *(piece.reshape(-1) for row in pieces for piece in row)]
        )
        sent = [sum(piece.numel() for piece in row) for row in pieces]
        received = [sum(row) for row in numels]
        arrived = _Swap.apply(self._thread, flat, sent, received, self._group, self._reason)
        if needs_gradient:
            self._thread = arrived[:0]
        each = iter(arrived.split([*itertools.chain(*numels)]))
        return [[next(each) for _ in row] for row in numels]


def place(
    blocks: Sequence[MatrixBlock], pieces: Sequence[Tensor], shape: tuple[int, int], like: Tensor
) -> Tensor:
    """Add flat pieces into blocks of a matrix of zeros."""
    return _Place.apply(like, blocks, shape, *pieces)


class _Swap(torch.autograd.Function):
    """An all-to-all of unequal parts; its backward is the one back."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        thread: Tensor,
        flat: Tensor,
        sent: list[int],
        received: list[int],
        group: ProcessGroup,
        reason: str,
    ) -> Tensor:
        ctx.back = received, sent, group, reason
        ctx.thread = thread.dtype, thread.device
        where = carrier_device(group, flat.device)
        output = torch.empty(sum(received), dtype=flat.dtype, device=where)
        Transport(group).all_to_all(output, flat.to(where), received, sent, reason=reason).wait()
        return output.to(flat.device)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        # Where a graph of the backward is made, the way back is a part of it on every rank.
        thread = torch.empty(0, requires_grad=torch.is_grad_enabled())
        back = _Swap.apply(thread, gradient.contiguous(), *ctx.back)
        dtype, device = ctx.thread
        return back[:0].to(device, dtype), back, None, None, None, None


class _Place(torch.autograd.Function):
    """Blocks added into a matrix: one node in the graph, where slices would be one for each."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        like: Tensor,
        blocks: Sequence[MatrixBlock],
        shape: tuple[int, int],
        *pieces: Tensor,
    ) -> Tensor:
        ctx.blocks = blocks
        whole = torch.zeros(shape, dtype=accumulation_dtype(like.dtype), device=like.device)
        for block, piece in zip(blocks, pieces, strict=True):
            target = whole[block]
            target += piece.view(target.shape)
        return whole.to(like.dtype)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        return None, None, None, *(gradient[block].reshape(-1) for block in ctx.blocks)
