"""The parts of a tensor that this rank holds, from its own placement; no communication."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate

from shoal._torch import distributed_tensor
from shoal.errors import CheckpointError
from shoal.layout.chunk import chunk_region
from shoal.layout.region import Region
from shoal.tensor.sharded import ShardedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A region of a whole tensor, and this rank's memory for it."""

    region: Region
    local: torch.Tensor

    def __post_init__(self) -> None:
        if tuple(self.local.shape) != self.region.sizes:
            raise CheckpointError(
                f"holds a local tensor of shape {tuple(self.local.shape)}, where its placement "
                f"says {self.region.sizes}: it is not sharded as torch.chunk cuts"
            )

    def view(self, region: Region) -> torch.Tensor:
        """This rank's memory for a region inside of this one."""
        return self.local[region.relative_to(self.region).slices]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The parts of a whole tensor that this rank holds; none where it holds nothing.

    `writes` is true on one of the ranks that hold the same parts, so that each element is saved
    once.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]
    writes: bool
    layout: str = ""


def share_of(name: str, tensor: object, *, is_first: bool) -> Share:
    """Say what this rank holds; a plain tensor is whole on every rank and written by the first.

    Who holds something that is no tensor as a whole passes a `Share` itself.
    """
    if isinstance(tensor, Share):
        return tensor
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(
            f"{name!r} is a {type(tensor).__name__}; a checkpoint holds tensors, "
            "and other values in `extra`"
        )
    if tensor.layout != torch.strided or tensor.is_meta:
        kind = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
        raise NotImplementedError(f"{name!r}: checkpoints of {kind} tensors are not supported")
    try:
        held, writes = _held(name, tensor, is_first)
        parts = tuple(Part(region=r, local=local) for r, local in held if r.numel > 0)
    except CheckpointError as error:
        raise CheckpointError(f"{name!r} {error}") from error
    return Share(
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        parts=parts,
        writes=writes,
        layout=_layout(tensor),
    )


def _layout(tensor: torch.Tensor) -> str:
    """How a tensor is laid out, and on which mesh, in words that stay readable."""
    if isinstance(tensor, ShardedTensor):
        placement = tensor.placement
        return f"{type(placement).__name__} on {placement.group.size()} ranks"
    if not isinstance(tensor, DTensor):
        return "plain"
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(f"axis{axis}" for axis in range(mesh.ndim))
    axes = ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
    return f"{', '.join(map(repr, tensor.placements))} on mesh({axes})"


def _held(
    name: str, tensor: torch.Tensor, is_first: bool
) -> tuple[list[tuple[Region, torch.Tensor]], bool]:
    """The regions that this rank holds with its memory for each, and whether it writes them."""
    if isinstance(tensor, ShardedTensor):
        return tensor.parts(), tensor.placement.replica == 0
    if not isinstance(tensor, DTensor):
        return [(Region.whole(tensor.shape), tensor.detach())], is_first
    region, writes = _sharded(name, tensor)
    # Without gradients, a DTensor gives its local tensor itself, not a copy that autograd tracks.
    with torch.no_grad():
        return [(region, tensor.to_local())] if region is not None else [], writes


def _sharded(name: str, tensor: DTensor) -> tuple[Region | None, bool]:
    """Cut the whole along each mesh axis in turn, as DTensor does.

    An axis that cuts what later axes have cut before (`fully_shard` after tensor parallelism) comes
    after them.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None, False
    region, writes = Region.whole(tensor.shape), True
    axes = list(enumerate(tensor.placements))
    late = [one for one in axes if distributed_tensor.cuts_late(one[1])]
    for axis, placement in [one for one in axes if one not in late] + late[::-1]:
        dim = distributed_tensor.cut_dim(placement)
        if dim is not None:
            region = chunk_region(region, mesh.size(axis), coordinate[axis], dim)
        elif type(placement) is Replicate:
            writes = writes and coordinate[axis] == 0
        else:
            raise NotImplementedError(
                f"{name!r}: checkpoints of the placement {placement!r} are not supported; "
                "redistribute it to Shard or Replicate first"
            )
    return region, writes
