"""WHO trains together. A DeviceMesh enters; a mesh info leaves.

A mesh info says which axis of the mesh shards parameters and which replicates them, with this
rank's place and process group on each.
"""

from shoal.mesh.axes import Axes, DataParallelMeshDims
from shoal.mesh.groups import (
    default_mesh,
    mesh_info_of,
    post_forward_mesh_info,
    validate_mesh,
)
from shoal.mesh.info import (
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    device_of,
    own_mesh_info,
)

__all__ = [
    "Axes",
    "DDPMeshInfo",
    "DataParallelMeshDims",
    "DataParallelMeshInfo",
    "FSDPMeshInfo",
    "HSDPMeshInfo",
    "default_mesh",
    "device_of",
    "mesh_info_of",
    "own_mesh_info",
    "post_forward_mesh_info",
    "validate_mesh",
]
