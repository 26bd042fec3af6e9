"""Process groups: the only file that makes any, all through meshes.

Each function here is collective: every rank of the world must call it, in the same order.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.weak import WeakIdKeyDictionary

from shoal._torch import meshes
from shoal.errors import MeshError
from shoal.mesh.axes import Axes, DataParallelMeshDims, reshard_size
from shoal.mesh.info import DataParallelMeshInfo, DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo


def default_mesh(
    device_type: str | None = None, mesh_dim_names: tuple[str, ...] | None = None
) -> DeviceMesh:
    """A 1-D mesh over the world, which is joined first if need be.

    The device type is that of the accelerator where there is one, else the CPU.
    """
    if device_type is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device_type = "cpu" if accelerator is None else accelerator.type
    if not dist.is_initialized():
        try:
            dist.init_process_group()
        except ValueError as error:
            raise MeshError(
                "there is no process group, and the environment does not say how to join one: "
                "start the program with torchrun, or call torch.distributed.init_process_group"
            ) from error
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=mesh_dim_names)


def validate_mesh(mesh: DeviceMesh, dp_mesh_dims: DataParallelMeshDims | None = None) -> None:
    """Refuse a mesh that cannot be trained on; see `Axes.check_data_parallel`."""
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"expected a DeviceMesh, got {mesh!r}")
    Axes.of(mesh).check_data_parallel(dp_mesh_dims)


def mesh_info_of(
    mesh: DeviceMesh, dp_mesh_dims: DataParallelMeshDims | None = None
) -> DataParallelMeshInfo:
    """The roles of a mesh's axes: by name where `dp_mesh_dims` names them, else by number.

    One axis shards; of two, the first replicates and the second shards.
    """
    validate_mesh(mesh, dp_mesh_dims)
    if dp_mesh_dims is None:
        return FSDPMeshInfo(mesh, 0) if mesh.ndim == 1 else HSDPMeshInfo(mesh, 1, 0)
    roles = (dp_mesh_dims.replicate_names, dp_mesh_dims.shard_names)
    axes = [_one_axis(mesh, names) for names in roles if names]
    if len(axes) == 2:
        return HSDPMeshInfo(meshes.concatenate_meshes(axes), 1, 0, dp_mesh_dims, mesh)
    if dp_mesh_dims.shard_names:
        return FSDPMeshInfo(axes[0], 0, None, dp_mesh_dims, mesh)
    return DDPMeshInfo(axes[0], None, 0, dp_mesh_dims, mesh)


# By the mesh itself: one that is equal may have been made for process groups that are gone. No
# attribute of it: a mesh is pickled with every DTensor, and groups cannot be.
_made: MutableMapping[DeviceMesh, dict[int, HSDPMeshInfo]] = WeakIdKeyDictionary()


def post_forward_mesh_info(
    reshard_after_forward: bool | int | None, mesh_info: DataParallelMeshInfo
) -> FSDPMeshInfo | None:
    """Over what parameters are sharded between forward and backward; None where they stay whole.

    A number of ranks makes groups of so many neighbours on the shard axis, once for each mesh:
    every unit that asks gets the same, since communicators are expensive.
    """
    if not isinstance(mesh_info, FSDPMeshInfo):
        return None
    shard_size = mesh_info.shard_mesh_size
    size = reshard_size(reshard_after_forward, shard_size)
    is_number = reshard_after_forward is not None and not isinstance(reshard_after_forward, bool)
    if reshard_after_forward is False or (is_number and size == 1):
        return None
    if size == shard_size:
        return mesh_info
    assert mesh_info.shard_mesh_dim is not None
    made = _made.setdefault(mesh_info.mesh, {})
    if size not in made:
        ranks = mesh_info.mesh.mesh.movedim(mesh_info.shard_mesh_dim, -1).reshape(-1, size)
        is_part = ranks.numel() < dist.get_world_size()
        make = _mesh_of_part if is_part else DeviceMesh
        mesh = make(mesh_info.mesh.device_type, ranks)
        made[size] = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    return made[size]


def _mesh_of_part(device_type: str, ranks: torch.Tensor) -> DeviceMesh:
    """A mesh of two axes, of which only its own ranks hear: others make other ones meanwhile."""
    (here,) = (ranks == dist.get_rank()).nonzero().tolist()
    groups: Any = [
        dist.new_group(members.tolist(), use_local_synchronization=True)
        for members in (ranks[:, here[1]], ranks[here[0]])
    ]
    names = ("replicate", "shard")
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=names)


def _one_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The 1-D mesh along one axis, or along several as if they were one."""
    if len(names) == 1:
        return mesh[names[0]]
    # torch keeps the flattened mesh under this name and answers with it the next time.
    return meshes.flatten_mesh(mesh[names], "_".join(names))
