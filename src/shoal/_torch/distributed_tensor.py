"""The inside of a DTensor: its local tensor, its spec."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.placement_types import _StridedShard

local_tensor: Callable[[Tensor], Tensor] = operator.attrgetter("_local_tensor")
"""A DTensor's own local tensor, not the differentiable view that `to_local` makes."""


spec_of: Callable[[Tensor], DTensorSpec] = operator.attrgetter("_spec")
"""Mesh, placements and global shape of a DTensor."""


place_getter: operator.attrgetter[Any] = operator.attrgetter(
    "_spec.placements", "_spec.mesh", "_spec.tensor_meta.shape"
)
"""Where a DTensor lies: what two must have in common to be added element by element."""


def set_local_tensor(tensor: DTensor, local: Tensor) -> None:
    """Give a DTensor other memory for its local tensor."""
    tensor._local_tensor = local


def set_spec(tensor: DTensor, spec: DTensorSpec) -> None:
    """Let a DTensor of the same global shape lie elsewhere."""
    tensor._spec = spec


def dtensor_spec(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> DTensorSpec:
    """The spec of a DTensor that does not exist yet."""
    meta = TensorMeta(torch.Size(shape), tuple(stride), dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def respec(spec: DTensorSpec, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensorSpec:
    """The spec of the same global tensor, distributed in another way."""
    return DTensorSpec(mesh, tuple(placements), tensor_meta=spec.tensor_meta)


def num_shards(spec: DTensorSpec, dim: int) -> int:
    """Into how many pieces a distributed tensor is cut along a dim."""
    return spec.num_shards_map[dim]


def cuts_rectangles(spec: DTensorSpec) -> bool:
    """Whether every rank has one rectangle of a tensor, and all of it once they are added up."""
    strided = [one.dim for one in spec.placements if isinstance(one, _StridedShard)]
    return not any(one.is_partial() for one in spec.placements) and all(
        spec.shape[dim] % spec.num_shards_map[dim] == 0 for dim in strided
    )


def chunk_at(
    spec: DTensorSpec, coordinate: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes and offsets of what a place of the mesh has of a tensor."""
    return _compute_local_shape_and_global_offset(
        spec.shape, tuple(spec.mesh.shape), list(coordinate), spec.placements
    )


def strided_shard(dim: int, split_factor: int) -> Placement:
    """A shard of a dim that another mesh axis, which comes later, has cut before."""
    return _StridedShard(dim, split_factor=split_factor)


def cuts_late(placement: Placement) -> bool:
    """Whether a placement cuts what later axes of the mesh have cut before."""
    return isinstance(placement, _StridedShard)


def cut_dim(placement: Placement) -> int | None:
    """The dim that a placement cuts into chunks; subclasses of Shard cut differently."""
    if type(placement) is Shard or isinstance(placement, _StridedShard):
        return placement.dim
    return None


def is_shard_of(placement: Placement, dim: int) -> bool:
    """Whether a placement cuts a dim, in whatever order."""
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim


def forget_placements() -> None:
    """Drop what DTensor remembers of its operations: it holds meshes whose groups may be gone.

    Meshes of the same ranks compare equal, so an old one would be taken for a new one.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


def dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Wrap a local tensor, of any dtype; skips what `from_local` checks, is not differentiable."""
    meta = spec.tensor_meta
    if meta is not None and meta.dtype != local.dtype:
        # Operations and compilers go by the dtype in the spec.
        spec = replace(spec, tensor_meta=meta._replace(dtype=local.dtype))
    # Past `__init__`, which does nothing, behind wrappers that cost more than all the rest.
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


@functools.cache
def draw_as_unsharded_on_cpu() -> None:
    """Let random initialisation of DTensors on CPU meshes give the values of the whole tensor.

    On CUDA, DTensor gives each rank its part of one sequence of random numbers. On CPU it has no
    such generator: ranks that share a seed would draw the same numbers for different chunks. Here
    every rank draws the whole tensor, and keeps its own chunk. From here on, in this process.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    aten = torch.ops.aten
    for op in (aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float):
        handlers.setdefault(op, _draw_whole)


def _draw_whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    target = args[0]
    assert isinstance(target, DTensor)
    mesh, placements, local = target.device_mesh, target.placements, target._local_tensor
    is_plain = all(type(placement) in (Shard, Replicate) for placement in placements)
    if mesh.device_type != "cpu" or local.is_meta or not is_plain:
        return _by_torch(op, args, kwargs)
    whole = torch.empty(target.shape, dtype=target.dtype, device=local.device)
    op(whole, *args[1:], **kwargs)
    shape, offset = compute_local_shape_and_global_offset(target.shape, mesh, placements)
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), length)
    local.copy_(whole)
    return target


@functools.cache
def step_locally() -> None:
    """Let optimizers use two operations on DTensors that are cut alike: each rank on its own part.

    `_fused_sgd_`, and `index_put_` of a number where a mask says so, as Rprop does it. DTensor has
    no rule for the one, and refuses the other. From here on, in this process.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers.setdefault(torch.ops.aten._fused_sgd_.default, _step_fused)
    handlers.setdefault(torch.ops.aten.index_put_.default, _put_where)


def _step_fused(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    specs = [[one._spec for one in tensors] for tensors in args[:2]]
    if any(some.placements != other.placements for some, other in zip(*specs, strict=True)):
        raise NotImplementedError("fused SGD: gradients are cut in another way than parameters")
    op(*([*map(local_tensor, tensors)] for tensors in args), **kwargs)


def _put_where(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, indices, value, *rest = args
    (mask,) = indices if len(indices) == 1 else (None,)
    if not isinstance(mask, DTensor) or mask.dtype is not torch.bool or value.numel() != 1:
        return _by_torch(op, args, kwargs)
    if mask._spec.placements != target._spec.placements or mask.shape != target.shape:
        return _by_torch(op, args, kwargs)
    number = value.full_tensor() if isinstance(value, DTensor) else value
    op(local_tensor(target), [local_tensor(mask)], number, *rest, **kwargs)
    return target


def _by_torch(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation as if it had no handler."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    ours = handlers.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = ours


@functools.cache
def view_complex_locally() -> None:
    """Let `view_as_real` of uneven complex shards be a view, as optimizers need it.

    DTensor makes such a vector whole first, and what is written to that is lost. From here on, in
    this process.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    aten = torch.ops.aten
    for op in (aten.view_as_real.default, aten.view_as_complex.default):
        handlers.setdefault(op, _view_complex)


def _view_complex(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    (tensor,) = args
    assert isinstance(tensor, DTensor)
    local, is_complex = op(tensor._local_tensor), tensor.is_complex()
    shape = (*tensor.shape, 2) if is_complex else tensor.shape[:-1]
    strides = torch.empty(shape, device="meta").stride()
    return dtensor(
        local, dtensor_spec(tensor.device_mesh, tensor.placements, shape, strides, local.dtype)
    )
