"""The strides of full parameters that are not row-major: channels-last, transposed.

Shards, gathered bytes and reductions are row-major, whatever the strides of the original: so the
layouts, reshards and checkpoints need not know of them. A full parameter gets them back by a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

Strides: TypeAlias = tuple[int, ...]


def row_major(shape: Sequence[int]) -> Strides:
    """The strides of a contiguous tensor of this shape, as torch has them."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def strides_of(tensor: torch.Tensor) -> Strides | None:
    """The strides of a tensor's copies, which have no holes; None for those that are row-major."""
    if tensor.is_contiguous():
        return None
    strides = torch.empty_like(tensor, device="meta").stride()
    return None if strides == row_major(tensor.shape) else strides


def shares_elements(tensor: torch.Tensor) -> bool:
    """Whether several indices are one element, as in what `expand` gives."""
    sizes = sorted((t, n) for t, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    end = 1
    for stride, size in sizes:
        if stride < end:
            return tensor.numel() > 0
        end = stride * (size - 1) + end
    return False


def with_strides(tensor: torch.Tensor, strides: Strides | None) -> torch.Tensor:
    """A tensor itself, or a copy with other strides; autograd and graphs come through."""
    if strides is None:
        return tensor
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)
