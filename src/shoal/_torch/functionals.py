"""Functional tensors: mutations that become new values."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor, disable_functional_mode
from torch._subclasses.functional_tensor import FunctionalTensorMode as FunctionalTensorMode
from torch.utils import _pytree as pytree

from shoal._torch.subclasses import with_inner, wraps_others


def functional(tensor: Tensor) -> Tensor:
    """A tensor whose mutations become new values."""
    return with_inner(tensor, FunctionalTensor.to_functional)


def is_functional(value: object) -> bool:
    """Whether a value is a tensor of a running trace, or wraps one."""
    if wraps_others(value):
        names, _ = cast(Any, value).__tensor_flatten__()
        return any(is_functional(getattr(value, name)) for name in names)
    return isinstance(value, FunctionalTensor)


def value_of(tensor: Tensor) -> Tensor:
    """What a functional tensor holds now."""
    if isinstance(tensor, FunctionalTensor):
        torch._sync(tensor)
        return torch._from_functional_tensor(tensor.elem)
    return with_inner(tensor, value_of) if wraps_others(tensor) else tensor


def is_reshaped(tensor: Tensor) -> bool:
    """Whether the shape or the strides of a functional tensor were changed in place."""
    return isinstance(tensor, FunctionalTensor) and torch._functionalize_has_metadata_mutation(
        tensor.elem
    )


def constant_in_trace(tensor: Tensor) -> Tensor:
    """A tensor with elements, as a constant of the graph that is being traced."""
    return run_as_it_is(torch.ops.aten.lift_fresh_copy.default, (tensor,), {})


def run_as_it_is(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Trace an operator past functionalisation.

    Graphs run in the order in which they were traced, so effects need no values that order them.
    """
    plain_args, plain_kwargs = pytree.tree_map_only(Tensor, value_of, (args, kwargs))
    with disable_functional_mode():
        result = op(*plain_args, **plain_kwargs)
    return pytree.tree_map_only(Tensor, functional, result)
