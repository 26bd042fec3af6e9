"""An operator for graphs: tensors end to end in one row of another dtype.

As casts and a `cat` it would be a kernel for every tensor once a compiler has been over it, and a
launch on the host for each. This is one kernel for all of them, which CUDA graphs can record.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal._torch import kernels

NAMESPACE = "shoal"
_SCHEMA = "lay_in_row(Tensor[] parts, ScalarType dtype) -> Tensor"


def lay_in_row(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """All elements of some tensors in their order, cast; one node of a graph."""
    define()
    return torch.ops.shoal.lay_in_row(parts, dtype)


@functools.cache
def define() -> torch.library.Library:
    """Make the operator known to torch, once."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(_SCHEMA, tags=(torch.Tag.flexible_layout,))
    library.impl("lay_in_row", _lay_in_row, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::lay_in_row", _row_for, lib=library)
    return library


def _lay_in_row(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    row = _row_for(parts, dtype)
    targets = row.split_with_sizes([part.numel() for part in parts])
    kernels.foreach_copy(list(targets), [part.reshape(-1) for part in parts])
    return row


def _row_for(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return parts[0].new_empty(sum(part.numel() for part in parts), dtype=dtype)
