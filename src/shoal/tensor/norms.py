"""Norms of sharded tensors: plain numbers that equal those of the whole tensors.

    rank's norm ──power──▶ sum over ranks ──root──▶ norm        any order but ±inf
    rank's norm ─────────▶ largest of ranks ──────▶ norm        inf, and -inf with the sign turned

One all-reduce for each call, dtype and process group, whatever the number of tensors. A DTensor's
norm is combined along each axis of its mesh that shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from shoal._torch import distributed_tensor, kernels, operators
from shoal.tensor.mixed import without_partial
from shoal.tensor.reductions import check_no_gradient, holders_of, shape_over_all_dims
from shoal.tensor.sharded import Handler, Op, ShardedTensor
from shoal.tensor.totals import Holders, accurate, add_up, largest

_Groups: TypeAlias = tuple[ProcessGroup, ...]


def _norm(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    given = operators.bind(op, args, kwargs)
    tensor = given["self"]
    check_no_gradient(op, tensor)
    shape = shape_over_all_dims(op, given)
    order = given["ord"] if "ord" in given else given["p"]
    (norm,) = _norms([tensor], 2 if order is None else order, given.get("dtype"))
    return norm.view(shape)


def _foreach_norm(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Serve a list, in which plain tensors and DTensors may be too."""
    given = operators.bind(op, args, kwargs)
    for tensor in given["self"]:
        check_no_gradient(op, tensor)
    return _norms([*map(without_partial, given["self"])], given["ord"], given["dtype"])


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
        kind, holders = dtype or _real(tensor.dtype), holders_of(tensor)
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
    """What ranks compute in; lists of several dtypes, which clipping never makes, stay as is."""
    dtypes = {tensor.dtype for tensor in tensors}
    dtype = accurate(dtypes.pop())
    return None if dtypes or dtype.is_complex else dtype


def _own(tensor: Tensor, order: float) -> Tensor:
    """What this rank takes the norm of; something that adds nothing where it holds nothing."""
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


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


HANDLERS: dict[str, Handler] = {
    "linalg_vector_norm.default": _norm,
    "norm.Scalar": _norm,
    "norm.ScalarOpt_dim": _norm,
    "norm.ScalarOpt_dim_dtype": _norm,
    "norm.ScalarOpt_dtype": _norm,
    "_foreach_norm.Scalar": _foreach_norm,
}
