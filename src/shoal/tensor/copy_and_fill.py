"""Tensors made like another, and values written into one: copies, constants, random numbers.

Random values are as an unsharded tensor would draw them, or drawn shard by shard. For a tensor that
a layout has cut, every rank draws the whole and keeps its own elements. So ranks that share the
state of their generator get exactly the values of the unsharded tensor, and share the state
afterwards too. The price is the memory of one whole tensor at a time, which initialisation can pay.
Listed shards are drawn one by one, each rank its own, as torch does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal._torch import operators
from shoal.tensor.sharded import Handler, Op, ShardedTensor, like_each
from shoal.tensor.unsupported import differently_cut, unsupported

_ROW_MAJOR = (None, torch.preserve_format, torch.contiguous_format)
_RANDOM = (
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
)


def copy_into(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Copy into a sharded tensor: one cut alike, a whole one of its shape, or a single number."""
    target, source, *rest = args
    if not isinstance(target, ShardedTensor):
        if isinstance(source, ShardedTensor):
            raise unsupported(op, "the target is a plain tensor", source)
        return target.copy_(source, *rest, **kwargs)
    if isinstance(source, ShardedTensor):
        if not target.placement.agrees(source.placement):
            raise differently_cut(op, target, source)
        for into, taken in zip(target.locals, source.locals, strict=True):
            into.copy_(taken, *rest, **kwargs)
    elif isinstance(source, DTensor):
        raise unsupported(op, "the source is a DTensor; use source.full_tensor()", target)
    elif source.shape == target.shape:
        _keep_own(target, source, *rest, **kwargs)
    elif source.dim() == 0:
        for into in target.locals:
            into.copy_(source, *rest, **kwargs)
    else:
        raise unsupported(
            op,
            f"the source is a plain tensor of shape {tuple(source.shape)}; expected a whole one of "
            f"{target.placement.shape}, of which each rank takes its elements",
            target,
        )
    return target


def _keep_own(target: ShardedTensor, whole: Tensor, non_blocking: bool = False) -> None:
    """Take this rank's elements out of a whole tensor that every rank has."""
    for region, part in target.parts():
        part.copy_(whole[region.slices], non_blocking=non_blocking)


def _detach(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    (tensor,) = args
    # A local tensor that is outside of autograd already must stay the very same.
    return like_each(
        tensor, [local.detach() if local.requires_grad else local for local in tensor.locals]
    )


def _made_like(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Make a tensor with the example's placement, perhaps of another dtype or device."""
    example, *rest = args
    if kwargs:
        _check_row_major(op, example, kwargs)
        kwargs.pop("memory_format", None)
        if kwargs.get("pin_memory") is False:
            # What torch says of its own accord, and then takes 0.7 µs for each shard to read.
            del kwargs["pin_memory"]
    run = operators.straight(op)
    return like_each(example, [run(local, *rest, **kwargs) for local in example.locals])


def _new_empty(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Make room for a tensor of the example's size, with its placement."""
    example, size = args
    if tuple(size) != example.placement.shape:
        raise unsupported(op, f"{tuple(size)} is another size", example)
    _check_row_major(op, example, kwargs)
    return like_each(example, [op(local, local.shape, **kwargs) for local in example.locals])


def _in_place(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    target, *rest = args
    for local in target.locals:
        op(local, *rest, **kwargs)
    return target


def _identity(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Write the identity matrix, or the rows and columns of it that the target has."""
    target = kwargs.pop("out")
    if tuple(args) != target.placement.shape:
        raise unsupported(op, f"{args} is another size than {target.placement.shape}", target)
    for region, part in target.parts():
        # Ones lie where the row is the column, which is this far from the part's own corner.
        below, right = region.offsets
        part.zero_().diagonal(below - right).fill_(1)
    return target


def _put_where(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Write a number where a mask says so that is cut alike, as Rprop does it."""
    target, indices, value, *rest = args
    (mask,) = indices if len(indices) == 1 else (None,)
    if not isinstance(target, ShardedTensor) or not isinstance(mask, ShardedTensor):
        raise unsupported(op, "expected a mask that is cut like the target", target)
    if mask.dtype is not torch.bool or not mask.placement.agrees(target.placement):
        raise differently_cut(op, target, mask)
    if value.numel() != 1:
        raise unsupported(op, f"expected one number, got {value.numel()}", target)
    for into, where in zip(target.locals, mask.locals, strict=True):
        op(into, [where], value, *rest, **kwargs)
    return target


def _fill_from_tensor(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    if isinstance(args[1], ShardedTensor):
        raise unsupported(op, "the value is itself sharded, so that one rank alone has it", args)
    return _in_place(op, args, kwargs)


def _check_row_major(op: Op, example: ShardedTensor, kwargs: dict[str, Any]) -> None:
    if kwargs.get("memory_format") not in _ROW_MAJOR:
        raise unsupported(op, f"a piece has no {kwargs['memory_format']}", example)
    if kwargs.get("layout") not in (None, torch.strided):
        raise unsupported(op, f"a piece cannot be {kwargs['layout']}", example)


def _draw(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    target, *rest = args
    if any(isinstance(arg, torch.Tensor) for arg in rest):
        raise unsupported(op, "its parameters are tensors", target)
    if target.placement.shards_stand_alone:
        return _in_place(op, args, kwargs)
    whole = torch.empty(target.placement.shape, dtype=target.dtype, device=target.device)
    op(whole, *rest, **kwargs)
    _keep_own(target, whole)
    return target


def _drawn_like(draw: Callable[[torch.Tensor], object]) -> Handler:
    """Make the handler of a function that draws a tensor like another."""

    def handle(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        made = torch.empty_like(*args, **kwargs)
        draw(made)
        return made

    return handle


HANDLERS: dict[str, Handler] = {
    "alias": _detach,
    "detach": _detach,
    "clone": _made_like,
    "empty_like": _made_like,
    "new_empty": _new_empty,
    "full_like": _made_like,
    "ones_like": _made_like,
    "zeros_like": _made_like,
    "_to_copy": _made_like,
    "copy_": copy_into,
    "eye.m_out": _identity,
    "index_put_": _put_where,
    "fill_.Scalar": _in_place,
    "fill_.Tensor": _fill_from_tensor,
    "zero_": _in_place,
    **dict.fromkeys(_RANDOM, _draw),
    "rand_like": _drawn_like(torch.Tensor.uniform_),
    "randn_like": _drawn_like(torch.Tensor.normal_),
}
