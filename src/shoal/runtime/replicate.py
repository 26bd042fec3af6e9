"""The entry point for ranks that hold whole parameters: `replicate(module)` on units."""

from __future__ import annotations

from typing import Any, Never

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shoal._torch import composable
from shoal.errors import InvariantError, MeshError
from shoal.mesh import (
    DataParallelMeshDims,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    mesh_info_of,
)
from shoal.runtime.fsdp_module import FSDPModule
from shoal.runtime.fully_shard import COPY_REFUSAL, check_device, make_units, modules_of
from shoal.runtime.managed_class import become
from shoal.runtime.mistakes import ignored_of, mesh_of, offload_of, precision_of, refuse_unknown
from shoal.runtime.policy import MixedPrecisionPolicy, OffloadPolicy
from shoal.runtime.torch_state import torch_state


class ReplicateModule(FSDPModule):
    """What `replicate` makes of a module's class."""


def replicate(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    **unknown: Never,
) -> Any:
    """Replicate a module over the one axis of a mesh, by default over all ranks.

    As `fully_shard`, with units, policies and the methods of `FSDPModule`, but each rank holds
    whole parameters (DTensors that are replicated): nothing is gathered over ranks, and gradients
    are all-reduced. The module is changed in place and returned. `shoal.replicate` is the other
    way to do it, which leaves parameters plain tensors.
    """
    refuse_unknown("replicate", unknown)
    policy, offload = precision_of(mp_policy), offload_of(offload_policy)
    ignored = ignored_of(ignored_params)
    _check_not_sharded(module)
    modules = modules_of(module, "replicate")
    mesh = mesh_of(mesh, ("replicate",))
    check_device(mesh)
    make_units(
        modules,
        _info_of(mesh, dp_mesh_dims),
        policy,
        offload,
        ignored,
        reshard_after_forward=False,
    )
    for one in modules:
        composable.register_composable(one, "replicate", torch_state(one))
        become(one, ReplicateModule, "Replicate", COPY_REFUSAL)
    return module


def _check_not_sharded(module: object) -> None:
    if isinstance(module, nn.Module) and composable.is_fully_sharded(module):
        raise InvariantError(
            "Cannot apply `replicate()` on a Module already managed by `fully_shard`; use one of "
            "the two"
        )


def _info_of(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> DataParallelMeshInfo:
    if dims is None:
        if mesh.ndim != 1:
            raise MeshError(f"replicate expects a 1D DeviceMesh but got {mesh}")
        return DDPMeshInfo(mesh, replicate_mesh_dim=0)
    info = mesh_info_of(mesh, dims)
    if isinstance(info, FSDPMeshInfo):
        raise MeshError(
            f"replicate needs dp_mesh_dims that only replicate, got {dims}; use fully_shard to "
            "shard over an axis"
        )
    return info
