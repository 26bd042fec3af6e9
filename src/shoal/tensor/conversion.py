"""Conversions: another dtype, device or process group; and DTensors, in both directions.

    to, cpu, cuda   the same cut, with another dtype, device or group
    from_dtensor    the very local tensor, seen as this rank's shard
    to_dtensor      the elements, brought to where a mesh and placements want them

Mesh axes that shard become the ranks of a group, axes that replicate become replicas:

    mesh (2, 2), [Replicate(), Shard(0)]    two replicas of a tensor, each over two ranks
    mesh (2, 2), [Shard(0), Shard(1)]       one tensor over four ranks

A conversion from or to a DTensor is the identity on the whole tensor, and so is its gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import Placement as MeshPlacement

from shoal._torch import distributed_tensor, operators
from shoal._torch.sharded import ShardMetadata
from shoal.errors import MeshError, UsageError
from shoal.layout.chunk import chunk_region
from shoal.layout.listing import Listing
from shoal.layout.region import Region
from shoal.tensor.gather import gather_regions
from shoal.tensor.listed import Listed
from shoal.tensor.older_api import is_shared, older_api
from shoal.tensor.placement import Placement, shard_metadata, shared_device
from shoal.tensor.reshard import SameElements, reshard
from shoal.tensor.sharded import ShardedTensor

Coordinates: TypeAlias = Mapping[int, tuple[int, ...]]
"""The coordinate in a mesh of each rank of the world."""

_KEPT = (torch.preserve_format, torch.contiguous_format)


def to(tensor: ShardedTensor, *args: Any, **kwargs: Any) -> ShardedTensor:
    """Do as `Tensor.to` does; returns the tensor itself where nothing changes."""
    group = kwargs.pop("process_group", None)
    copy = kwargs.pop("copy", False)
    try:
        device, dtype, non_blocking, memory_format = operators.parsed_to(*args, **kwargs)
    except TypeError as error:
        raise RuntimeError(
            f"ShardedTensor.to() have wrong arguments: {args}, {kwargs}: {error}"
        ) from error
    _check_format(memory_format)
    if device is None:
        device = tensor.device
    elif tensor.placement.shards_stand_alone:
        device = _current(device)
    moved: Any = Tensor.to(tensor, device, dtype or tensor.dtype, non_blocking, copy)
    return _placed(tensor, moved, device, group)


def to_cpu(
    tensor: ShardedTensor, memory_format: torch.memory_format, group: ProcessGroup | None
) -> ShardedTensor:
    """Do as `ShardedTensor.cpu` says."""
    _check_format(memory_format)
    device = torch.device("cpu")
    return _placed(tensor, Tensor.to(tensor, device), device, group)


def to_cuda(
    tensor: ShardedTensor,
    device: torch.device | str | int | None,
    non_blocking: bool,
    memory_format: torch.memory_format,
    group: ProcessGroup | None,
) -> ShardedTensor:
    """Do as `ShardedTensor.cuda` says."""
    _check_format(memory_format)
    current = torch.device("cuda", torch.cuda.current_device())
    if device is not None and torch.device(device) != current:
        raise AssertionError(
            f"a ShardedTensor moves to each rank's current device, here {current}, got {device}: "
            "call torch.cuda.set_device first, or reshard"
        )
    moved = Tensor.to(tensor, current, non_blocking=non_blocking)
    return _placed(tensor, moved, current, group, always=True)


def _placed(
    tensor: ShardedTensor,
    moved: Any,
    device: torch.device,
    group: ProcessGroup | None,
    *,
    always: bool = False,
) -> ShardedTensor:
    """Say where other ranks' shards are now; this rank's may have been there before."""
    placement: Placement = moved.placement.on(device)
    if group is not None and group is not placement.group:
        placement = placement.within(group)
    if placement is not moved.placement or (always and moved is tensor):
        moved = ShardedTensor.of(moved.locals, placement, requires_grad=moved.requires_grad)
    if moved is not tensor and is_shared(tensor):
        older_api().remote_shards.share(moved)
    return moved


def _current(device: torch.device) -> torch.device:
    if device.type != "cuda":
        return device
    current = torch.cuda.current_device()
    if device.index not in (None, current):
        warnings.warn(
            f"ShardedTensor.to moves to each rank's current device, here cuda:{current}, "
            f"not to {device}; use `reshard` to put shards elsewhere",
            stacklevel=4,
        )
    return torch.device("cuda", current)


def _check_format(memory_format: torch.memory_format | None) -> None:
    if memory_format is not None and memory_format not in _KEPT:
        raise RuntimeError(
            "Only `torch.contiguous_format` or `torch.preserve_format` is supported, "
            f"got {memory_format}"
        )


def from_dtensor(dtensor: DTensor, process_group: ProcessGroup | None = None) -> ShardedTensor:
    """The DTensor's local tensor as a shard, copied only if not contiguous; no communication.

    The group is that of the axes that shard, or `process_group`, which has those ranks or more. Of
    ranks in the group that have the same elements, the first holds them, and the others nothing.
    """
    if not isinstance(dtensor, DTensor):
        raise UsageError(f"expected a DTensor, got a {type(dtensor).__name__}")
    where = _coordinates(dtensor.device_mesh)
    here = dist.get_rank()
    if here not in where:
        raise MeshError(
            f"rank {here} is not in the DTensor's mesh of ranks {sorted(where)}: convert there"
        )
    group = process_group or _group_of(dtensor)
    ranks = _ranks_in(where, group)
    placement = Listed(
        listed=tuple(_shards(dtensor, where, ranks)),
        shape=tuple(dtensor.shape),
        group=group,
        replica=_replica(dtensor.device_mesh, where, ranks),
    )
    records = torch.is_grad_enabled() and dtensor.requires_grad
    local = dtensor.to_local() if records else distributed_tensor.local_tensor(dtensor)
    if not placement.regions:
        local = local.reshape(-1)[:0].view(placement.local_shapes[0])
    made = ShardedTensor.of(local.contiguous(), placement)
    if not records:
        return made
    back = partial(to_dtensor, mesh=dtensor.device_mesh, placements=dtensor.placements)
    return SameElements.apply(dtensor, [made], back)


def to_dtensor(
    tensor: ShardedTensor, mesh: DeviceMesh, placements: Sequence[MeshPlacement]
) -> DTensor:
    """The tensor as a DTensor: over the same memory where it is cut like that, else collective.

    All ranks of the tensor's group are in the mesh. Where the mesh is larger, its other ranks have
    replicas of the tensor, and convert them with the same call.
    """
    source = tensor.placement
    if len(placements) != mesh.ndim:
        raise UsageError(f"expected one placement for each of {mesh.ndim} axes, got {placements}")
    where = _coordinates(mesh)
    wanted = [
        _region(source.shape, mesh, placements, where[rank])
        for rank in _ranks_in(where, source.group)
    ]
    own = wanted[source.rank]
    is_cut_so = all(
        source.regions_of(rank) == ((region,) if region.numel else ())
        for rank, region in enumerate(wanted)
    )
    if not is_cut_so:
        device = shared_device(tensor.device, source)
        local = torch.empty(own.sizes, dtype=tensor.dtype, device=device)
        gather_regions(tensor, Listing(enumerate(wanted)), local, reason="a conversion to DTensor")
    elif own.numel:
        ((_, local),) = tensor.parts()
    else:
        local = torch.empty(own.sizes, dtype=tensor.dtype, device=tensor.device)
    spec = distributed_tensor.dtensor_spec(
        mesh, [_normal(p, tensor) for p in placements], tensor.shape, tensor.stride(), tensor.dtype
    )
    made = distributed_tensor.dtensor(local, spec)
    records = torch.is_grad_enabled() and tensor.requires_grad
    if not records:
        return made
    placements = made.placements

    def back(gradient: DTensor) -> ShardedTensor:
        # What is Partial is added up here; what is replicated is the same on all ranks.
        gradient = gradient.redistribute(placements=placements)
        return reshard(from_dtensor(gradient, source.group), source)

    return SameElements.apply(tensor, [made], back)


def _region(
    shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[MeshPlacement],
    coordinate: Sequence[int],
) -> Region:
    """The region of the rank at a coordinate: the whole, cut along each mesh axis in turn.

    So two ranks have the same elements, or none in common.
    """
    region = Region.whole(shape)
    for axis, placement in enumerate(placements):
        # Subclasses of Shard cut differently, so the exact type counts.
        if type(placement) is Shard:
            region = chunk_region(region, mesh.size(axis), coordinate[axis], placement.dim)
        elif type(placement) is not Replicate:
            raise NotImplementedError(
                f"{placement!r} of a DTensor has no counterpart in a ShardedTensor: redistribute "
                "to Shard or Replicate first"
            )
    return region


def _shards(dtensor: DTensor, where: Coordinates, ranks: Sequence[int]) -> list[ShardMetadata]:
    """The shards that the ranks of a group hold, each element in one of them."""
    shape, mesh, placements = dtensor.shape, dtensor.device_mesh, dtensor.placements
    holders: dict[Region, int] = {}
    for rank in ranks:
        holders.setdefault(_region(shape, mesh, placements, where[rank]), rank)
    numel = sum(region.numel for region in holders)
    if numel != dtensor.numel():
        raise MeshError(
            f"ranks {[*ranks]} have {numel:,} of the {dtensor.numel():,} elements of a DTensor of "
            f"{tuple(shape)}: the group must have all ranks along the mesh axes that shard"
        )
    # Who holds nothing is not listed, unless there is nothing to hold.
    listed = {r: rank for r, rank in holders.items() if r.numel} or {Region.whole(shape): ranks[0]}
    here, device = dist.get_rank(), dtensor.device
    return [shard_metadata(r, rank, device, is_own=rank == here) for r, rank in listed.items()]


def _group_of(dtensor: DTensor) -> ProcessGroup:
    """The group of the axes that shard; of the last one, where none does."""
    mesh = dtensor.device_mesh
    axes = [axis for axis, p in enumerate(dtensor.placements) if type(p) is Shard]
    if len(axes) < 2:
        return mesh.get_group(axes[0] if axes else mesh.ndim - 1)
    world = dist.group.WORLD
    if world is not None and len(axes) == mesh.ndim and mesh.size() == world.size():
        return world
    raise UsageError(
        f"{len(axes)} axes of the DTensor's mesh {tuple(mesh.shape)} shard, and c10d has no group "
        "of their ranks: pass process_group, a group that every rank of the mesh has made with "
        "torch.distributed.new_group"
    )


def _replica(mesh: DeviceMesh, where: Coordinates, ranks: Sequence[int]) -> int:
    """The number of a group among those that stand beside one another in a mesh."""
    here = where[dist.get_rank()]
    number = 0
    for axis in range(mesh.ndim):
        if len({where[rank][axis] for rank in ranks}) == 1:
            number = number * mesh.size(axis) + here[axis]
    return number


def _coordinates(mesh: DeviceMesh) -> Coordinates:
    everywhere = product(*map(range, mesh.shape))
    return dict(zip(mesh.mesh.flatten().tolist(), everywhere, strict=True))


def _ranks_in(where: Coordinates, group: ProcessGroup) -> list[int]:
    """A group's ranks in its order; raises unless the mesh has them all."""
    ranks = dist.get_process_group_ranks(group) if isinstance(group, ProcessGroup) else []
    if not ranks or not all(rank in where for rank in ranks):
        raise MeshError(
            f"expected a group of some of the mesh's ranks {sorted(where)}, got ranks {ranks}"
        )
    return ranks


def _normal(placement: MeshPlacement, tensor: Tensor) -> MeshPlacement:
    """With a dim counted from the front, as DTensor's own functions have it."""
    return Shard(placement.dim % tensor.dim()) if type(placement) is Shard else placement
