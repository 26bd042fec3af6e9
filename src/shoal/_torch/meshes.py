"""Device meshes, cut or joined without new process groups."""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh


def data_parallel_mesh_dims_class() -> type | None:
    """`DataParallelMeshDims`, which torch has only after 2.11."""
    return getattr(importlib.import_module("torch.distributed.fsdp"), "DataParallelMeshDims", None)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The mesh as one axis; made once for each name on the root mesh."""
    return mesh._flatten(name)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that another one was cut from; itself if it was not."""
    return mesh._get_root_mesh()


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Meshes cut from one root, as the axes of one mesh; makes no process group."""
    return DeviceMesh._concatenate(meshes)


def lone_mesh(device_type: str) -> DeviceMesh:
    """A mesh of this rank alone, which needs no process group."""
    return DeviceMesh(device_type, torch.tensor([0]), _init_backend=False, _rank=0)


def set_apart(mesh: DeviceMesh, number: int) -> None:
    """Let a mesh equal none but itself and those of the same number.

    Meshes are equal when the ranks in them have the same numbers, and tensors on equal meshes are
    added piece by piece: wrong without a word where the ranks are other processes than before.
    """
    private = cast(Any, mesh)
    private._thread_id = -number  # part of what is compared; torch sets it for threads as ranks
    private._hash = None
