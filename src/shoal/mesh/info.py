"""Mesh infos: which axis of a mesh shards, which replicates, and this rank's place on each.

They have the constructors and attributes of torch's, but are frozen, and refuse what torch lets
pass: an axis that is not there, one axis in both roles, a role that the class would ignore.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shoal.errors import MeshError, MissingAxisError
from shoal.mesh.axes import Axes, DataParallelMeshDims


@dataclass(frozen=True)
class DataParallelMeshInfo:
    """A mesh whose ranks train on different data.

    Where the data-parallel axes were named within a larger mesh, `dp_mesh_dims` has those names
    and `spmd_mesh` is the larger mesh, on which the parameters are already distributed.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None
    dp_mesh_dims: DataParallelMeshDims | None = field(default=None, hash=False)
    spmd_mesh: DeviceMesh | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, DeviceMesh):
            raise MeshError(f"expected a DeviceMesh, got {self.mesh!r}")
        if self.shard_mesh_dim is None and self.replicate_mesh_dim is None:
            raise MissingAxisError(
                f"expected shard_mesh_dim, replicate_mesh_dim or both for {self.mesh}, got none"
            )
        axes = Axes.of(self.mesh)
        for what in ("shard_mesh_dim", "replicate_mesh_dim"):
            index = getattr(self, what)
            if index is not None:
                axes.check_index(what, index)
        if self.shard_mesh_dim == self.replicate_mesh_dim:
            raise MeshError(
                f"axis {self.shard_mesh_dim} of {self.mesh} cannot both shard and replicate"
            )
        if (self.dp_mesh_dims is None) != (self.spmd_mesh is None):
            raise MeshError("dp_mesh_dims names axes of spmd_mesh: give both or none")
        if self.dp_mesh_dims is not None and self.spmd_mesh is not None:
            Axes.of(self.spmd_mesh).check_data_parallel(self.dp_mesh_dims)

    def _join(self, role: str) -> dist.ProcessGroup:
        """Take this rank's place on the axis that shards or replicates."""
        axis = getattr(self, f"{role}_mesh_dim")
        if axis is None:
            raise MissingAxisError(f"{type(self).__name__} needs {role}_mesh_dim, got None")
        if self.mesh.get_coordinate() is None:
            raise MeshError(
                f"rank {dist.get_rank()} is not part of {self.mesh}: only its own ranks can train "
                "on it"
            )
        group = self.mesh.get_group(axis)
        object.__setattr__(self, f"{role}_mesh_size", self.mesh.size(axis))
        object.__setattr__(self, f"{role}_mesh_rank", group.rank())
        object.__setattr__(self, f"{role}_process_group", group)
        return group

    @property
    def is_spmd_mesh(self) -> bool:
        """Whether the data-parallel axes were named within a larger mesh."""
        return self.dp_mesh_dims is not None


@dataclass(frozen=True)
class FSDPMeshInfo(DataParallelMeshInfo):
    """A mesh with an axis over which parameters are sharded.

    `reduce_scatter_process_group`, where given, has the same ranks as the shard group, so that
    gradients can be reduced while parameters are gathered.
    """

    reduce_scatter_process_group: dist.ProcessGroup | None = field(
        default=None, kw_only=True, repr=False, compare=False
    )
    shard_mesh_size: int = field(init=False, repr=False, compare=False)
    shard_mesh_rank: int = field(init=False, repr=False, compare=False)
    shard_process_group: dist.ProcessGroup = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        group = self._join("shard")
        if self.replicate_mesh_dim is not None and not isinstance(self, DDPMeshInfo):
            raise MeshError("FSDPMeshInfo does not replicate: use HSDPMeshInfo for both axes")
        reduce_group = self.reduce_scatter_process_group
        if reduce_group is not None and _ranks(reduce_group) != _ranks(group):
            raise MeshError(
                f"expected a reduce_scatter_process_group of ranks {_ranks(group)}, as the shard "
                f"group has, got {_ranks(reduce_group)}"
            )


@dataclass(frozen=True)
class DDPMeshInfo(DataParallelMeshInfo):
    """A mesh with an axis over which parameters are replicated."""

    replicate_mesh_size: int = field(init=False, repr=False, compare=False)
    replicate_mesh_rank: int = field(init=False, repr=False, compare=False)
    replicate_process_group: dist.ProcessGroup = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._join("replicate")
        if self.shard_mesh_dim is not None and not isinstance(self, FSDPMeshInfo):
            raise MeshError("DDPMeshInfo does not shard: use HSDPMeshInfo for both axes")


@dataclass(frozen=True)
class HSDPMeshInfo(FSDPMeshInfo, DDPMeshInfo):
    """A mesh that shards over one axis and replicates over another."""


def own_mesh_info(info: Any) -> FSDPMeshInfo:
    """A mesh info that shards, as one of ours: torch's own have the same fields."""
    if isinstance(info, FSDPMeshInfo):
        return info
    if isinstance(info, DataParallelMeshInfo) or getattr(info, "shard_mesh_dim", None) is None:
        raise MeshError(f"expected an FSDPMeshInfo or an HSDPMeshInfo, got {info!r}")
    cls = FSDPMeshInfo if info.replicate_mesh_dim is None else HSDPMeshInfo
    return cls(
        info.mesh,
        info.shard_mesh_dim,
        info.replicate_mesh_dim,
        getattr(info, "dp_mesh_dims", None),
        getattr(info, "spmd_mesh", None),
        reduce_scatter_process_group=getattr(info, "reduce_scatter_process_group", None),
    )


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device of this rank: of an accelerator's mesh, the current one."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    current = torch.get_device_module(mesh.device_type).current_device()
    return torch.device(mesh.device_type, current)


def _ranks(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)
