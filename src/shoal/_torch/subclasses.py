"""Tensor subclasses, as torch makes them or looks into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class QuickDispatchMode(TorchDispatchMode):
    """A dispatch mode that does not tell Dynamo to leave each call alone, a tenth of a call's time.

    For programs that compile nothing.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


no_torch_function: Any = torch._C._disabled_torch_function_impl
"""Makes a tensor subclass go straight to its `__torch_dispatch__`, at no cost per call."""


no_torch_function_subclass: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass
"""A context in which tensor subclasses' `__torch_function__` is passed by."""


make_wrapper: Callable[..., Any] = Tensor._make_wrapper_subclass
"""A tensor with metadata and no memory, and of a subclass.

Arguments by position (cls, shape, strides, storage offset, memory format, dtype, layout, device,
pinned, requires_grad) are read in three quarters of the time that names take.
"""


def set_data(tensor: Tensor, other: Tensor) -> None:
    """`tensor.data = other` as torch itself does it, for a class that has its own `data`."""
    cast(Any, Tensor).data.__set__(tensor, other)


get_requires_grad: Callable[[Tensor], bool] = cast(Any, Tensor).requires_grad.__get__
"""`tensor.requires_grad` as torch itself reads it, in C."""


def set_requires_grad(tensor: Tensor, requires_grad: bool) -> None:
    """`tensor.requires_grad = ...` as torch itself does it, for a class that has its own."""
    cast(Any, Tensor).requires_grad.__set__(tensor, requires_grad)


def wraps_others(value: object) -> bool:
    """Whether a value is a tensor that wraps others, which tracing can look into."""
    return is_traceable_wrapper_subclass(value)


def with_inner(tensor: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A wrapper like this one around changed tensors, in the same place for autograd."""
    if not wraps_others(tensor):
        return change(tensor) if isinstance(tensor, Tensor) else _real_object(tensor)
    names, context = tensor.__tensor_flatten__()
    inner = {name: with_inner(getattr(tensor, name), change) for name in names}
    made = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    torch._mirror_autograd_meta_to(tensor, made)  # type: ignore[attr-defined]
    return made


def _real_object(value: Any) -> Any:
    """The real object behind one that fake tensors carry in its place."""
    return getattr(value, "real_obj", value)
