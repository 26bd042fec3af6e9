"""The tensor class around the bytes of one parameter, while it is sharded and while it is full.

A sharded parameter is a `DTensor` for the `Even` layout and a `ShardedTensor` for all others. A
full one is a plain tensor, or a DTensor where tensor parallelism had distributed it before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, is_
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shoal._torch import distributed_tensor
from shoal._torch import meshes as torch_meshes
from shoal.errors import UsageError
from shoal.layout import Packing
from shoal.layout.strides import row_major
from shoal.mesh import DataParallelMeshInfo, DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from shoal.tensor import sharded
from shoal.tensor.packed import Packed
from shoal.tensor.sharded import ShardedTensor


class ParameterWrapping(ABC):
    """The wrapping around the bytes of one parameter."""

    __slots__ = ()

    identity: ClassVar[Callable[[torch.Tensor], object]]
    """What a tensor that is known to be in this wrapping keeps for as long as its bytes stay."""
    is_same: ClassVar[Callable[[object, object], bool]] = is_
    """Compares two identities."""

    def adopt(self, original: nn.Parameter, local: torch.Tensor) -> nn.Parameter:
        """The sharded parameter in place of an original one."""
        return nn.Parameter(self.shard(local), requires_grad=original.requires_grad)

    @abstractmethod
    def shard(self, local: torch.Tensor) -> torch.Tensor:
        """What this rank holds, in any dtype, as the tensor that an optimizer sees."""

    def grad(self, parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of a gradient, as the tensor that an optimizer sees."""
        return self.shard(local)

    @abstractmethod
    def local_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The bytes in a sharded tensor; None if it is in another wrapping."""

    @abstractmethod
    def rehome(self, tensor: torch.Tensor, local: torch.Tensor) -> None:
        """Let a sharded tensor have its bytes elsewhere."""

    @abstractmethod
    def follow(self, tensor: torch.Tensor) -> ParameterWrapping:
        """The same wrapping for what a sharded tensor has become, such as one of another dtype."""

    def within(self, info: FSDPMeshInfo, packing: Packing, index: int) -> ParameterWrapping:
        """The same wrapping on other ranks."""
        raise NotImplementedError(
            f"parameter {packing.params[index].name!r} cannot move to other ranks: it is sharded "
            "by FullyShardedDataParallel; shard the model with fully_shard"
        )

    def move(self, tensor: torch.Tensor, local: torch.Tensor) -> None:
        """Let a tensor that was sharded like this over other ranks be sharded over these."""
        raise NotImplementedError("see within")

    @property
    def is_distributed(self) -> bool:
        """Whether the full parameter is a DTensor, on axes that are not data-parallel."""
        return False

    def full(self, data: torch.Tensor) -> torch.Tensor:
        """The full parameter over gathered bytes, as `shaped` gives them."""
        return data

    def grad_data(self, grad: torch.Tensor) -> torch.Tensor:
        """The bytes of a full gradient."""
        return grad

    def shaped(self, data: torch.Tensor) -> torch.Tensor:
        """Gathered bytes in the shape of the parameter."""
        return data

    def packed(self, grad: torch.Tensor) -> torch.Tensor:
        """A plain full gradient in the shape of the gathered bytes."""
        return grad


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedWrapping(ParameterWrapping):
    """A piece of any layout."""

    identity: ClassVar[Callable[[torch.Tensor], object]] = attrgetter("local")

    placement: sharded.Placement

    def shard(self, local: torch.Tensor) -> torch.Tensor:
        """See `ParameterWrapping.shard`."""
        return ShardedTensor.of(local, self.placement)

    def grad(self, parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor | None:
        """See `ParameterWrapping.grad`; checks nothing, since it is made anew in every step."""
        assert isinstance(parameter, ShardedTensor)
        return sharded.like(parameter, local)

    def local_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """See `ParameterWrapping.local_of`."""
        return tensor.local if isinstance(tensor, ShardedTensor) else None

    def rehome(self, tensor: torch.Tensor, local: torch.Tensor) -> None:
        """See `ParameterWrapping.rehome`."""
        assert isinstance(tensor, ShardedTensor)
        tensor.local = local

    def follow(self, tensor: torch.Tensor) -> ParameterWrapping:
        """See `ParameterWrapping.follow`."""
        assert isinstance(tensor, ShardedTensor)
        return replace(self, placement=tensor.placement)

    def within(self, info: FSDPMeshInfo, packing: Packing, index: int) -> ParameterWrapping:
        """See `ParameterWrapping.within`."""
        rank, group = info.shard_mesh_rank, info.shard_process_group
        return replace(self, placement=Packed(packing=packing, index=index, group=group, rank=rank))

    def move(self, tensor: torch.Tensor, local: torch.Tensor) -> None:
        """See `ParameterWrapping.move`."""
        assert isinstance(tensor, ShardedTensor)
        tensor.placement, tensor.local = self.placement, local


@dataclass(frozen=True, slots=True, kw_only=True)
class DTensorWrapping(ParameterWrapping):
    """A chunk of a dim, on the data-parallel axes and the axes of whoever came before."""

    identity: ClassVar[Callable[[torch.Tensor], object]] = distributed_tensor.local_tensor

    spec: distributed_tensor.DTensorSpec
    before: distributed_tensor.DTensorSpec | None = None
    """How the full parameter is distributed over other axes, if it is."""
    data_axes: frozenset[int] = frozenset()
    """Which axes of `before` are data-parallel: there gradients are summed by the engine."""

    def shard(self, local: torch.Tensor) -> torch.Tensor:
        """See `ParameterWrapping.shard`."""
        return distributed_tensor.dtensor(local, self.spec)

    def local_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """See `ParameterWrapping.local_of`."""
        return distributed_tensor.local_tensor(tensor) if isinstance(tensor, DTensor) else None

    def rehome(self, tensor: torch.Tensor, local: torch.Tensor) -> None:
        """See `ParameterWrapping.rehome`."""
        assert isinstance(tensor, DTensor)
        distributed_tensor.set_local_tensor(tensor, local)

    def follow(self, tensor: torch.Tensor) -> ParameterWrapping:
        """See `ParameterWrapping.follow`."""
        assert isinstance(tensor, DTensor)
        return replace(self, spec=distributed_tensor.spec_of(tensor))

    def within(self, info: FSDPMeshInfo, packing: Packing, index: int) -> ParameterWrapping:
        """See `ParameterWrapping.within`."""
        placements = self.spec.placements
        return replace(self, spec=distributed_tensor.respec(self.spec, info.mesh, placements))

    def move(self, tensor: torch.Tensor, local: torch.Tensor) -> None:
        """See `ParameterWrapping.move`; the tensor may have another dtype, as moments may."""
        assert isinstance(tensor, DTensor)
        spec = distributed_tensor.spec_of(tensor)
        placed = distributed_tensor.respec(spec, self.spec.mesh, self.spec.placements)
        distributed_tensor.set_local_tensor(tensor, local)
        distributed_tensor.set_spec(tensor, placed)

    @property
    def is_distributed(self) -> bool:
        """See `ParameterWrapping.is_distributed`."""
        return self.before is not None

    def full(self, data: torch.Tensor) -> torch.Tensor:
        """See `ParameterWrapping.full`."""
        return data if self.before is None else distributed_tensor.dtensor(data, self.before)

    def grad_data(self, grad: torch.Tensor) -> torch.Tensor:
        """See `ParameterWrapping.grad_data`."""
        return grad if self.before is None else local_grad(grad, self.before, self.data_axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberWrapping(DTensorWrapping):
    """A number by itself, of which every rank holds a copy: the bytes are as many as ranks.

    The copy of the first rank is the one that counts. All get the same updates, but for the order
    in which a backend adds up.
    """

    num_copies: int

    def shard(self, local: torch.Tensor) -> torch.Tensor:
        """See `ParameterWrapping.shard`."""
        return distributed_tensor.dtensor(local.view(()), self.spec)

    def local_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """See `ParameterWrapping.local_of`."""
        if not isinstance(tensor, DTensor):
            return None
        return distributed_tensor.local_tensor(tensor).view(1)

    def rehome(self, tensor: torch.Tensor, local: torch.Tensor) -> None:
        """See `ParameterWrapping.rehome`."""
        assert isinstance(tensor, DTensor)
        distributed_tensor.set_local_tensor(tensor, local.view(()))

    def within(self, info: FSDPMeshInfo, packing: Packing, index: int) -> ParameterWrapping:
        """See `ParameterWrapping.within`."""
        moved = DTensorWrapping.within(self, info, packing, index)
        assert isinstance(moved, NumberWrapping)
        return replace(moved, num_copies=info.shard_mesh_size)

    def move(self, tensor: torch.Tensor, local: torch.Tensor) -> None:
        """See `ParameterWrapping.move`."""
        DTensorWrapping.move(self, tensor, local.view(()))

    def shaped(self, data: torch.Tensor) -> torch.Tensor:
        """See `ParameterWrapping.shaped`."""
        return data[0]

    def packed(self, grad: torch.Tensor) -> torch.Tensor:
        """See `ParameterWrapping.packed`."""
        return grad.expand(self.num_copies).contiguous()

    def grad_data(self, grad: torch.Tensor) -> torch.Tensor:
        """See `ParameterWrapping.grad_data`."""
        # No `super()`: a class with slots is made anew by its decorator.
        return self.packed(DTensorWrapping.grad_data(self, grad))


def local_grad(
    grad: torch.Tensor,
    spec: distributed_tensor.DTensorSpec,
    kept_axes: frozenset[int] = frozenset(),
) -> torch.Tensor:
    """The bytes of the gradient of a distributed parameter, placed as that is on all other axes."""
    assert isinstance(grad, DTensor)
    wanted = [
        grad.placements[axis] if axis in kept_axes else placement
        for axis, placement in enumerate(spec.placements)
    ]
    if list(grad.placements) != wanted:
        grad = grad.redistribute(placements=wanted)
    return distributed_tensor.local_tensor(grad)


def bytes_of(parameter: torch.Tensor) -> torch.Tensor:
    """The part of a parameter that the engine cuts: all of it, or a DTensor's local tensor."""
    return (
        distributed_tensor.local_tensor(parameter) if isinstance(parameter, DTensor) else parameter
    )


def dtensor_wrapping(
    name: str, parameter: torch.Tensor, dim: int, info: DataParallelMeshInfo
) -> DTensorWrapping:
    """Shard a parameter along a dim over the data-parallel axes of a mesh."""
    distributed_tensor.step_locally()
    if info.mesh.device_type == "cpu":
        distributed_tensor.draw_as_unsharded_on_cpu()
    if parameter.is_complex():
        distributed_tensor.view_complex_locally()
    is_number = bytes_of(parameter).dim() == 0
    before, data_axes = None, frozenset[int]()
    if info.is_spmd_mesh:
        if not isinstance(parameter, DTensor):
            raise UsageError(
                f"with dp_mesh_dims all parameters must be DTensors on the whole mesh, but "
                f"{name!r} is a plain tensor: distribute it (distribute_module) before fully_shard"
            )
        before = distributed_tensor.spec_of(parameter)
        spec, data_axes = _on_named_axes(name, before, None if is_number else dim, info)
    elif isinstance(parameter, DTensor):
        before = distributed_tensor.spec_of(parameter)
        spec = _beside_other_axes(before, None if is_number else dim, info)
    else:
        spec = distributed_tensor.dtensor_spec(
            info.mesh,
            _data_placements(info, Replicate() if is_number else Shard(dim)),
            parameter.shape,
            row_major(parameter.shape),
            parameter.dtype,
        )
    if is_number:
        num_copies = num_copies_on(info)
        return NumberWrapping(spec=spec, before=before, data_axes=data_axes, num_copies=num_copies)
    return DTensorWrapping(spec=spec, before=before, data_axes=data_axes)


def num_copies_on(info: DataParallelMeshInfo) -> int:
    """How many ranks that shard parameters have a copy of a number by itself."""
    return info.shard_mesh_size if isinstance(info, FSDPMeshInfo) else 1


def _data_placements(info: DataParallelMeshInfo, shard: Placement) -> tuple[Placement, ...]:
    if isinstance(info, HSDPMeshInfo):
        return (Replicate(), shard)
    return (shard,) if isinstance(info, FSDPMeshInfo) else (Replicate(),)


def _beside_other_axes(
    before: distributed_tensor.DTensorSpec, dim: int | None, info: DataParallelMeshInfo
) -> distributed_tensor.DTensorSpec:
    """The parameter is distributed over axes of its own, such as tensor parallelism's."""
    shard: Placement = Replicate()
    if dim is not None:
        factor = distributed_tensor.num_shards(before, dim)
        shard = distributed_tensor.strided_shard(dim, factor) if factor > 1 else Shard(dim)
    mesh = torch_meshes.concatenate_meshes([info.mesh, before.mesh])
    placements = (*_data_placements(info, shard), *before.placements)
    return distributed_tensor.respec(before, mesh, placements)


def _on_named_axes(
    name: str, before: distributed_tensor.DTensorSpec, dim: int | None, info: DataParallelMeshInfo
) -> tuple[distributed_tensor.DTensorSpec, frozenset[int]]:
    """The parameter is distributed over the whole mesh, of which some axes are data-parallel."""
    dims = info.dp_mesh_dims
    assert dims is not None
    if before.mesh is not info.spmd_mesh:
        raise UsageError(
            f"parameter {name!r} and fully_shard must have the same mesh, got {before.mesh} and "
            f"{info.spmd_mesh}"
        )
    names = before.mesh.mesh_dim_names or ()
    shard_axes = [names.index(n) for n in dims.shard_names]
    data_axes = shard_axes + [names.index(n) for n in dims.replicate_names]
    for axis in data_axes:
        if not isinstance(before.placements[axis], Replicate):
            raise UsageError(
                f"Expected Replicate for parameter {name!r} on the data-parallel axis "
                f"{names[axis]!r}, got {before.placements[axis]}"
            )
    placements = list(before.placements)
    for axis in shard_axes if dim is not None else ():
        assert dim is not None
        factor = 1
        for later in range(axis + 1, before.mesh.ndim):
            if distributed_tensor.is_shard_of(before.placements[later], dim):
                factor *= before.mesh.size(later)
        placements[axis] = (
            distributed_tensor.strided_shard(dim, factor) if factor > 1 else Shard(dim)
        )
    mesh = before.mesh
    if len(shard_axes) > 1:
        mesh, placements = _with_one_shard_axis(before.mesh, placements, info, names)
    return distributed_tensor.respec(before, mesh, placements), frozenset(data_axes)


def _with_one_shard_axis(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    info: DataParallelMeshInfo,
    names: Sequence[str],
) -> tuple[DeviceMesh, list[Placement]]:
    """Several axes that shard together are one axis of the sharded parameter's mesh."""
    assert info.dp_mesh_dims is not None
    shard_names, replicate_names = info.dp_mesh_dims.shard_names, info.dp_mesh_dims.replicate_names
    meshes: list[DeviceMesh] = []
    kept: list[Placement] = []
    for axis, name in enumerate(names):
        if name == shard_names[0]:
            meshes.append(info.mesh)
            kept.extend(_data_placements(info, placements[axis]))
        elif name not in shard_names and not (
            name in replicate_names and isinstance(info, DDPMeshInfo)
        ):
            meshes.append(mesh[name])
            kept.append(placements[axis])
    return torch_meshes.concatenate_meshes(meshes), kept
