"""A sharded matrix as functions above autograd see it: blocks, each of which some rank holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shoal.errors import UsageError
from shoal.layout.region import Region
from shoal.tensor.base import parts_of
from shoal.tensor.sharded import ShardedTensor, like_each


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
