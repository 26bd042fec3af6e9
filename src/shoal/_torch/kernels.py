"""Kernels that work on many tensors at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

FEW = 8
"""Up to here a copy of each tensor takes the host less time than one kernel for all."""


def copy_columns(rows: Tensor, widths: list[int], outs: list[Tensor]) -> None:
    """Copy neighbouring bands of columns into a tensor each, in one kernel."""
    torch.split_with_sizes_copy(rows, widths, dim=1, out=outs)


def chunk_into_columns(tensors: list[Tensor], num_chunks: int, out: Tensor) -> None:
    """Cut tensors along dim 0, pad the chunks, lay those of one number side by side in a row.

    One kernel, which also casts to the dtype of `out`.
    """
    torch._chunk_cat(tensors, dim=0, num_chunks=num_chunks, out=out)


def foreach_norm(tensors: list[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The norm of each tensor, in few kernels."""
    return list(torch._foreach_norm(tensors, order, dtype))


foreach_add: Callable[[list[Tensor], float], None] = torch._foreach_add_
"""Add a number to each tensor, in few kernels."""


foreach_copy: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_copy_
"""Copy each source into its target, casting where dtypes differ, in few kernels."""


def fused_adam(*, decoupled: bool) -> Callable[..., None]:
    """The operator of Adam's fused step, or of AdamW's."""
    return torch._fused_adamw_ if decoupled else torch._fused_adam_  # pyright: ignore[reportReturnType]


FUSED_STEPS: tuple[Any, ...] = (
    torch.ops.aten._fused_adamw_,
    torch.ops.aten._fused_adam_,
    torch.ops.aten._fused_sgd_,
)
"""The operators that are an optimizer's whole step, in place."""

unflatten: Callable[[Tensor, list[Tensor]], tuple[Tensor, ...]] = cast(
    Any, torch._C
)._nn.unflatten_dense_tensors
"""Views of a flat tensor, in the shapes of examples, one after another."""
