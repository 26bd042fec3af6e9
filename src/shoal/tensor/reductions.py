"""Reductions over all elements of sharded tensors: sums, extremes, comparisons, norms.

Results are plain tensors, the same on every rank. The parts of all ranks travel as one vector of
float64 (two for a complex number, int64 for a whole one). So there is one all-reduce for any number
of tensors, and adding up neither overflows nor rounds where a result of the tensors' own dtype
would show it. Norms take one for each call, dtype and process group:

    rank's norm ──power──▶ sum over ranks ──root──▶ norm        any order but ±inf
    rank's norm ─────────▶ largest of ranks ──────▶ norm        inf, and -inf with the sign turned

A DTensor's norm is combined along each axis of its mesh that shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.tensor import DTensor, Partial, Replicate

from shoal._torch import distributed_tensor, kernels, operators
from shoal.comm.messages import carrier_device
from shoal.comm.transport import Transport
from shoal.tensor.optimizer_lists import unwrap_lists
from shoal.tensor.placement import Placement, shared_device
from shoal.tensor.reshard import reshard
from shoal.tensor.sharded import Handler, Op, ShardedTensor
from shoal.tensor.unsupported import unsupported

_LOW = (torch.float16, torch.bfloat16)
_Groups: TypeAlias = tuple[ProcessGroup, ...]


class _MeshAxis(NamedTuple):
    """The ranks along one axis of a DTensor's mesh."""

    group: ProcessGroup


Holders: TypeAlias = Placement | _MeshAxis
"""The ranks of a group that have parts of a tensor, all on one type of device if a DTensor's."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a rank computes its part of a number: float32 at least."""
    return torch.float32 if dtype in _LOW else dtype


def _lowest_of(dtype: torch.dtype) -> float | int:
    """The lowest value of a dtype, which is the largest only where there is no other."""
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def add_up(parts: Tensor, placement: Holders) -> Tensor:
    """Sum a vector over the ranks of a tensor that is placed like this."""
    if parts.is_complex():
        pairs = torch.view_as_real(parts)
        return torch.view_as_complex(add_up(pairs.view(-1), placement).view_as(pairs))
    total = _widened(parts, placement)
    Transport(placement.group).all_reduce(
        total, ReduceOp.SUM, reason="a sum over ShardedTensors"
    ).wait()
    return total.to(parts.device)


def largest(parts: Tensor, placement: Holders) -> Tensor:
    """The largest of each element of a vector over the ranks; NaN where any rank has NaN."""
    values = _widened(parts, placement)
    # Backends differ in whether NaN wins a comparison, so it travels beside the values.
    is_nan = values.isnan()
    both = torch.cat(
        [values.masked_fill(is_nan, _lowest_of(values.dtype)), is_nan.to(values.dtype)]
    )
    Transport(placement.group).all_reduce(
        both, ReduceOp.MAX, reason="a maximum of ShardedTensors"
    ).wait()
    values, is_nan = both.to(parts.device).chunk(2)
    return values.masked_fill(is_nan > 0, torch.nan) if values.is_floating_point() else values


def _widened(parts: Tensor, placement: Holders) -> Tensor:
    """A copy where the group can carry it: on the same type of device on every rank."""
    device = parts.device
    if isinstance(placement, Placement):
        device = shared_device(device, placement)
    device = carrier_device(placement.group, device)
    dtype = torch.float64 if parts.is_floating_point() else torch.int64
    return parts.to(device, dtype, copy=True)


def _holders_of(tensor: Tensor) -> tuple[Holders, ...]:
    """The groups whose ranks hold different elements of a tensor; none for a plain one."""
    if isinstance(tensor, ShardedTensor):
        return (tensor.placement,)
    if not isinstance(tensor, DTensor):
        return ()
    axes = [axis for axis, each in enumerate(tensor.placements) if not isinstance(each, Replicate)]
    return tuple(_MeshAxis(tensor.device_mesh.get_group(axis)) for axis in axes)


def _without_partial(tensor: Tensor) -> Tensor:
    """The same tensor with elements that are there; adds up what ranks have parts of."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = [Replicate() if isinstance(p, Partial) else p for p in tensor.placements]
    return tensor.redistribute(placements=placements)


def _check_no_gradient(op: Op, tensor: Tensor) -> None:
    """Raise where autograd records the reduction: its gradient would be a plain tensor."""
    if torch.is_grad_enabled() and isinstance(tensor, ShardedTensor) and tensor.requires_grad:
        raise unsupported(
            op, "it cannot be differentiated; use torch.no_grad() or detach()", tensor
        )


def _sum(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    given, tensor, shape = _bound(op, args, kwargs)
    dtype = given["dtype"] or (torch.int64 if _is_whole(tensor.dtype) else tensor.dtype)
    return _total(tensor, dtype).to(dtype).view(shape)


def _mean(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    given, tensor, shape = _bound(op, args, kwargs)
    dtype = given["dtype"] or tensor.dtype
    if _is_whole(dtype):
        raise unsupported(op, f"the mean of {dtype} is not whole; pass a dtype", tensor)
    return (_total(tensor, dtype) / tensor.numel()).to(dtype).view(shape)


def _max(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    _, tensor, shape = _bound(op, args, kwargs)
    _check_ordered(op, tensor)
    return _largest(tensor, tensor.locals).to(tensor.dtype).view(shape)


def _min(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    _, tensor, shape = _bound(op, args, kwargs)
    _check_ordered(op, tensor)
    if tensor.is_floating_point():
        negative = [-local for local in tensor.locals]
        return (-_largest(tensor, negative)).to(tensor.dtype).view(shape)
    # Unlike the negative, the complement of the lowest whole number is a number too.
    complement = [~local.long() for local in tensor.locals]
    return (~_largest(tensor, complement)).to(tensor.dtype).view(shape)


def _any(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    _, tensor, shape = _bound(op, args, kwargs)
    part = torch.stack([local.any() for local in tensor.locals]).any().long()
    return (largest(part.view(1), tensor.placement) > 0).view(shape)


def _all(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    _, tensor, shape = _bound(op, args, kwargs)
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
    for group in {holders.group: None for tensor in tensors for holders in _holders_of(tensor)}:
        Transport(group).all_reduce(
            found_inf.view(-1), ReduceOp.MAX, reason="the search for gradients that are not finite"
        ).wait()


def _bound(
    op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], ShardedTensor, tuple[int, ...]]:
    """The arguments by name, the tensor, and the shape of a result over all of its dims."""
    given = operators.bind(op, args, kwargs)
    tensor, dim = given["self"], given.get("dim")
    _check_no_gradient(op, tensor)
    dims = (dim,) if isinstance(dim, int) else tuple(dim or ())
    if dims and {d % max(tensor.dim(), 1) for d in dims} != set(range(max(tensor.dim(), 1))):
        raise unsupported(
            op, f"it reduces over dims {dims} of {tensor.dim()}, not over all", tensor
        )
    return given, tensor, (1,) * tensor.dim() if given.get("keepdim") else ()


def _total(tensor: ShardedTensor, dtype: torch.dtype) -> Tensor:
    sums = [local.sum(dtype=accumulation_dtype(dtype)) for local in tensor.locals]
    return add_up(torch.stack(sums).sum().view(1), tensor.placement)


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
        values = (
            local.to(accumulation_dtype(local.dtype)) if local.is_floating_point() else local.long()
        )
        nothing = values.new_tensor(_lowest_of(values.dtype))
        parts.append(values.max() if values.numel() > 0 else nothing)
    return largest(torch.stack(parts).max().view(1), tensor.placement)


def _norm(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    given, tensor, shape = _bound(op, args, kwargs)
    order = given["ord"] if "ord" in given else given["p"]
    (norm,) = _norms([tensor], 2 if order is None else order, given.get("dtype"))
    return norm.view(shape)


def _foreach_norm(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Serve a list, in which plain tensors and DTensors may be too."""
    given = operators.bind(op, args, kwargs)
    for tensor in given["self"]:
        _check_no_gradient(op, tensor)
    return _norms([*map(_without_partial, given["self"])], given["ord"], given["dtype"])


def _norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The norm of each tensor, in the dtype that the unsharded one would have."""
    order = float(order)
    local_dtype = dtype or _local_dtype(tensors)
    try:
        norms = kernels.foreach_norm(
            [_own(tensor, order) for tensor in tensors], order, local_dtype
        )
    except AttributeError:
        # There is no `local` where a rank has several shards.
        norms = [_own_norm(tensor, order, local_dtype) for tensor in tensors]
    members: dict[tuple[_Groups, torch.dtype], tuple[tuple[Holders, ...], list[int]]] = {}
    for index, tensor in enumerate(tensors):
        kind, holders = dtype or tensor.dtype.to_real(), _holders_of(tensor)
        key = tuple(each.group for each in holders), kind
        members.setdefault(key, (holders, []))[1].append(index)
    for (_, kind), (holders, indices) in members.items():
        totals = torch.stack([norms[index] for index in indices]).double()
        for each in holders:
            totals = _combine(totals, order, each)
        for index, total in zip(indices, totals.to(kind).unbind(), strict=True):
            norms[index] = total
    return norms


def _local_dtype(tensors: Sequence[Tensor]) -> torch.dtype | None:
    """The dtype that ranks compute in; None leaves each tensor of a mixed list in its own."""
    dtypes = {tensor.dtype for tensor in tensors}
    dtype = accumulation_dtype(dtypes.pop())
    return None if dtypes or dtype.is_complex else dtype


def _own(tensor: Tensor, order: float) -> Tensor:
    """The local tensor whose norm this rank takes; a neutral element where it holds nothing."""
    local = tensor
    if isinstance(tensor, ShardedTensor):
        local = tensor.local
    elif isinstance(tensor, DTensor):
        local = distributed_tensor.local_tensor(tensor)
    if local.numel() > 0 or tensor.numel() == 0:
        return local
    return local.new_full((1,), _nothing(order))


def _own_norm(tensor: Tensor, order: float, dtype: torch.dtype | None) -> Tensor:
    """This rank's part of the norm of a tensor of any number of shards."""
    held = tensor.locals if isinstance(tensor, ShardedTensor) else (_own(tensor, order),)
    held = [local for local in held if local.numel() > 0 or tensor.numel() == 0]
    if not held:
        return torch.full((), _nothing(order), dtype=dtype or tensor.dtype, device=tensor.device)
    norms = torch.stack(kernels.foreach_norm(held, order, dtype))
    # How many elements are not zero adds up; any other norm is the norm of norms.
    return norms.sum() if order == 0 else torch.linalg.vector_norm(norms, order)


def _nothing(order: float) -> float:
    return 0.0 if order >= 0 else torch.inf


def _combine(norms: Tensor, order: float, placement: Holders) -> Tensor:
    if math.isinf(order):
        return largest(norms, placement) if order > 0 else -largest(-norms, placement)
    if order in (0, 1):
        return add_up(norms, placement)
    return add_up(norms.pow(order), placement).pow(1 / order)


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
    "linalg_vector_norm.default": _norm,
    "norm.Scalar": _norm,
    "norm.ScalarOpt_dim": _norm,
    "norm.ScalarOpt_dim_dtype": _norm,
    "norm.ScalarOpt_dtype": _norm,
    "_foreach_norm.Scalar": _foreach_norm,
}
