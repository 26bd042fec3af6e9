"""Axes: the named directions of a mesh, and which of them shard or replicate. Pure.

No process group is needed to check them, so a mistake is found before any is made.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from torch.distributed.device_mesh import DeviceMesh

from shoal._torch import meshes
from shoal.errors import MeshError, MissingAxisError

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class _DataParallelMeshDims:
    """Which named axes of a larger mesh are data-parallel, for a torch that has no such class.

    Several names of one kind act as one axis.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise MeshError("DataParallelMeshDims needs axes to shard or to replicate over")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The axes that shard."""
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The axes that replicate."""
        return _as_names(self.replicate)


def _as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)


if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims
else:
    DataParallelMeshDims = meshes.data_parallel_mesh_dims_class() or _DataParallelMeshDims


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The sizes of a mesh's axes, outermost first, and their names where they have any."""

    sizes: tuple[int, ...]
    names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.sizes):
            raise MeshError(f"expected axes of 1 rank or more, got sizes {self.sizes}")
        if self.names is None:
            return
        if len(self.names) != len(self.sizes):
            raise MeshError(f"expected one name per axis, got {self.names} for {self.sizes}")
        if len(set(self.names)) != len(self.names):
            raise MeshError(f"expected axes of different names, got {self.names}")

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Self:
        """The axes of a mesh."""
        return cls(sizes=tuple(mesh.shape), names=mesh.mesh_dim_names)

    def check_index(self, what: str, index: int) -> None:
        """Refuse an axis that is not there."""
        if type(index) is not int or not 0 <= index < len(self.sizes):
            raise MeshError(
                f"{what}={index!r} is no axis of a mesh of shape {self.sizes}: "
                f"expected 0 to {len(self.sizes) - 1}"
            )

    def check_data_parallel(self, dims: DataParallelMeshDims | None) -> None:
        """Refuse a mesh that cannot be trained on: 1-D shards, 2-D also replicates, else by name.

        Without `dims` every axis is data-parallel; with them the named ones are.
        """
        if dims is not None:
            self._check_names(dims)
        elif len(self.sizes) not in (1, 2):
            raise MeshError(
                f"fully_shard expects a 1D or 2D DeviceMesh but got DeviceMesh of shape "
                f"{self.sizes}: one axis (shard) or two (replicate, shard). For a larger mesh say "
                "which axes are data-parallel: dp_mesh_dims=DataParallelMeshDims(shard=...)"
            )
        elif len(self.sizes) == 2 and self.names is None:
            raise MissingAxisError(
                f"got a mesh of shape {self.sizes} without names. Please init the 2D mesh for "
                "HSDP with mesh_dim_names specified: "
                'init_device_mesh(..., mesh_dim_names=("replicate", "shard"))'
            )

    def _check_names(self, dims: DataParallelMeshDims) -> None:
        if self.names is None:
            raise MeshError(
                f"dp_mesh_dims names axes, but the mesh of shape {self.sizes} has no names: "
                "pass mesh_dim_names when making it"
            )
        used = dims.shard_names + dims.replicate_names
        if not used:
            raise MeshError(f"expected at least one axis to shard or replicate over, got {dims}")
        unknown = [name for name in used if name not in self.names]
        if unknown:
            raise MeshError(f"{unknown} not found in mesh.mesh_dim_names, which are {self.names}")
        repeated = [name for name, count in Counter(used).items() if count > 1]
        if repeated:
            raise MeshError(f"an axis has one role, but {repeated} are named twice in {dims}")
        for names in (dims.shard_names, dims.replicate_names):
            in_order = tuple(name for name in self.names if name in names)
            if in_order != tuple(names):
                raise MeshError(
                    f"axes that act as one must be named in the mesh's order: "
                    f"expected {in_order}, got {names}"
                )


def reshard_size(reshard_after_forward: bool | int | None, shard_size: int) -> int:
    """Over how many ranks a parameter is spread between forward and backward.

    True and None leave it over all that shard; False keeps it whole, which is 1.
    """
    if reshard_after_forward is None or reshard_after_forward is True:
        return shard_size
    if reshard_after_forward is False:
        return 1
    if type(reshard_after_forward) is not int:
        raise MeshError(
            f"expected reshard_after_forward to be a bool, or a number of ranks, or None, got "
            f"{reshard_after_forward!r}"
        )
    if reshard_after_forward < 1 or shard_size % reshard_after_forward != 0:
        raise MeshError(
            f"expected reshard_after_forward to divide the {shard_size} ranks that shard, got "
            f"{reshard_after_forward}"
        )
    if reshard_after_forward == 1 and shard_size > 1:
        _LOGGER.warning(
            "reshard_after_forward=1 keeps parameters whole after forward, as False does; "
            "pass True to reshard them"
        )
    return reshard_after_forward
