"""Storages: which tensors share one, how two exchange their bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from shoal._torch.subclasses import wraps_others


def can_swap_memory() -> bool:
    """Whether two storages can exchange their bytes, which torch learned after 2.11."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def swap_memory(a: torch.UntypedStorage, b: torch.UntypedStorage) -> None:
    """Exchange the bytes of two storages; views follow their storage."""
    cast(Any, a)._swap_data_ptr_(b)


def alias(data: Tensor) -> Tensor:
    """The same memory as a tensor with a storage of its own that begins there.

    A DTensor over a view that begins later in its storage cannot be deep-copied: torch takes it
    for one with memory of its own.
    """
    return torch.from_dlpack(data) if data.numel() and not data.is_meta else data.clone()


def storage_pointer(tensor: Tensor) -> int:
    """Where a tensor's storage is; 0 for none, and for a tensor without one of its own."""
    if wraps_others(tensor) or not has_storage(tensor):
        return 0
    return tensor.untyped_storage().data_ptr()


def storage_key(tensor: Tensor) -> int | None:
    """A number that tensors of one storage have in common; None without a storage."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


is_set_to: Callable[[Tensor, Tensor], bool] = torch._C.TensorBase.is_set_to
"""Whether two tensors are the same piece of memory, with the same shape and strides."""


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype to sum a tensor in: its own, but no narrower than fp32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def has_storage(tensor: Tensor) -> bool:
    """Whether a tensor has memory that can be compared."""
    return torch._C._has_storage(tensor)
