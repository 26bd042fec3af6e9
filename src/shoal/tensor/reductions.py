"""Reductions of sharded tensors over all their elements: plain results, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.tensor import DTensor

from shoal._torch import operators
from shoal.comm.transport import Transport
from shoal.tensor.lists import unwrap_lists
from shoal.tensor.mixed import sharding_axes
from shoal.tensor.refusal import unsupported
from shoal.tensor.reshard import reshard
from shoal.tensor.sharded import Handler, Op, ShardedTensor
from shoal.tensor.totals import Holders, accurate, add_up, largest, lowest_of


def holders_of(tensor: Tensor) -> tuple[Holders, ...]:
    """The groups whose ranks hold different elements of a tensor; none for a plain one."""
    if isinstance(tensor, ShardedTensor):
        return (tensor.placement,)
    return tuple(sharding_axes(tensor)) if isinstance(tensor, DTensor) else ()


def shape_over_all_dims(op: Op, given: dict[str, Any]) -> tuple[int, ...]:
    """The shape of a result over all dims; other ways to reduce are refused."""
    tensor, dim = given["self"], given.get("dim")
    dims = (dim,) if isinstance(dim, int) else tuple(dim or ())
    if dims and {d % max(tensor.dim(), 1) for d in dims} != set(range(max(tensor.dim(), 1))):
        raise unsupported(
            op, f"it reduces over dims {dims} of {tensor.dim()}, not over all", tensor
        )
    return (1,) * tensor.dim() if given.get("keepdim") else ()


def check_no_gradient(op: Op, tensor: Tensor) -> None:
    """Raise where autograd records the reduction: its gradient would be a plain tensor."""
    if torch.is_grad_enabled() and isinstance(tensor, ShardedTensor) and tensor.requires_grad:
        raise unsupported(
            op, "it cannot be differentiated; use torch.no_grad() or detach()", tensor
        )


def _sum(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    given, tensor, shape = _prepared(op, args, kwargs)
    dtype = given["dtype"] or (torch.int64 if _is_whole(tensor.dtype) else tensor.dtype)
    part = _own_sum(tensor, accurate(dtype))
    return add_up(part.view(1), tensor.placement).to(dtype).view(shape)


def _mean(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    given, tensor, shape = _prepared(op, args, kwargs)
    dtype = given["dtype"] or tensor.dtype
    if _is_whole(dtype):
        raise unsupported(op, f"the mean of {dtype} is not whole; pass a dtype", tensor)
    part = _own_sum(tensor, accurate(dtype))
    total = add_up(part.view(1), tensor.placement)
    return (total / tensor.numel()).to(dtype).view(shape)


def _max(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    _, tensor, shape = _prepared(op, args, kwargs)
    _check_ordered(op, tensor)
    return _largest(tensor, tensor.locals).to(tensor.dtype).view(shape)


def _min(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    _, tensor, shape = _prepared(op, args, kwargs)
    _check_ordered(op, tensor)
    if tensor.is_floating_point():
        negative = [-local for local in tensor.locals]
        return (-_largest(tensor, negative)).to(tensor.dtype).view(shape)
    # Unlike the negative, the complement of the lowest whole number is a number too.
    complement = [~local.long() for local in tensor.locals]
    return (~_largest(tensor, complement)).to(tensor.dtype).view(shape)


def _any(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    _, tensor, shape = _prepared(op, args, kwargs)
    part = torch.stack([local.any() for local in tensor.locals]).any().long()
    return (largest(part.view(1), tensor.placement) > 0).view(shape)


def _all(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    _, tensor, shape = _prepared(op, args, kwargs)
    part = torch.stack([~local.all() for local in tensor.locals]).any().long()
    return (largest(part.view(1), tensor.placement) == 0).view(shape)


def _same(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Compare two tensors on each rank; they are the same where no rank sees a difference."""
    first, second, *rest = args
    if not isinstance(first, ShardedTensor) or not isinstance(second, ShardedTensor):
        raise TypeError(
            f"Both arguments to {op} need to be of type ShardedTensor, got {type(first)} and "
            f"{type(second)}: compare tensor.full_tensor() with a plain one"
        )
    group = first.placement.group
    if group is not second.placement.group:
        raise RuntimeError(
            "All distributed tensors should use the same ProcessGroup if used together in an op: "
            f"{op} got tensors of {first.placement} and {second.placement}"
        )
    if first.shape != second.shape:
        return False
    if not isinstance(group, ProcessGroup):
        return True  # a rank that is in no group has nothing of either
    # As torch has it: the same values in shards of other metadata are not the same tensor.
    stand_alone = first.placement.shards_stand_alone and second.placement.shards_stand_alone
    differs = stand_alone and first.metadata() != second.metadata()
    if not differs:
        with torch.no_grad():
            second = reshard(second, first.placement)
        pairs = zip(first.locals, second.locals, strict=True)
        differs = not all(op(one, other, *rest, **kwargs) for one, other in pairs)
    found = torch.tensor([differs], dtype=torch.int64, device=first.device)
    return largest(found, first.placement).item() == 0


def _unscale(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale gradients; what is not finite on one rank makes every rank skip the step."""
    tensors, found_inf, inv_scale = args
    _, (local,) = unwrap_lists(op, (tensors,))
    op(local, found_inf, inv_scale)
    for group in {holders.group: None for tensor in tensors for holders in holders_of(tensor)}:
        Transport(group).all_reduce(
            found_inf.view(-1), ReduceOp.MAX, reason="the search for gradients that are not finite"
        ).wait()


def _prepared(
    op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], ShardedTensor, tuple[int, ...]]:
    given = operators.bind(op, args, kwargs)
    tensor = given["self"]
    check_no_gradient(op, tensor)
    return given, tensor, shape_over_all_dims(op, given)


def _own_sum(tensor: ShardedTensor, dtype: torch.dtype) -> Tensor:
    return torch.stack([local.sum(dtype=dtype) for local in tensor.locals]).sum()


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _check_ordered(op: Op, tensor: ShardedTensor) -> None:
    if tensor.numel() == 0:
        raise unsupported(op, "the tensor has no element", tensor)
    if tensor.is_complex():
        raise unsupported(op, "complex numbers have no order", tensor)


def _largest(tensor: ShardedTensor, locals_: Sequence[Tensor]) -> Tensor:
    parts: list[Tensor] = []
    for local in locals_:
        values = local.to(accurate(local.dtype)) if local.is_floating_point() else local.long()
        nothing = values.new_tensor(lowest_of(values.dtype))
        parts.append(values.max() if values.numel() > 0 else nothing)
    return largest(torch.stack(parts).max().view(1), tensor.placement)


HANDLERS: dict[str, Handler] = {
    "sum.default": _sum,
    "sum.dim_IntList": _sum,
    "mean.default": _mean,
    "mean.dim": _mean,
    "max.default": _max,
    "amax.default": _max,
    "min.default": _min,
    "amin.default": _min,
    "any.default": _any,
    "any.dims": _any,
    "all.default": _all,
    "all.dims": _all,
    "allclose.default": _same,
    "equal.default": _same,
    "_amp_foreach_non_finite_check_and_unscale_.default": _unscale,
}
