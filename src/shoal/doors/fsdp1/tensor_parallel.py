"""Parameters that tensor parallelism has distributed: a wrapper shards their local parts.

| | of such a parameter |
|---|---|
| what optimizers hold | a range of the local part, in one dim |
| what modules compute with | a `DTensor` on its own axes |
| full state dicts | the same |
| sharded state dicts | a `DTensor` on the wrapper's axes and its own |
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shoal._torch import distributed_tensor, meshes
from shoal.mesh import DataParallelMeshInfo
from shoal.runtime.parameter_wrapping import bytes_of

Spec = distributed_tensor.DTensorSpec | None
"""How a parameter is distributed, if it is."""


def spec_of(parameter: torch.Tensor) -> Spec:
    """How a parameter is distributed before a wrapper shards it."""
    return distributed_tensor.spec_of(parameter) if isinstance(parameter, DTensor) else None


def whole(local: torch.Tensor, spec: Spec) -> torch.Tensor:
    """The tensor whose local part this is."""
    return local if spec is None else distributed_tensor.dtensor(local, spec)


def view(local: torch.Tensor, spec: Spec) -> torch.Tensor:
    """`whole`, through which gradients reach the local part."""
    if spec is None:
        return local
    return DTensor.from_local(
        local,
        spec.mesh,
        spec.placements,
        run_check=False,
        shape=spec.shape,
        stride=spec.stride,
    )


def local_part(value: torch.Tensor, spec: Spec) -> torch.Tensor:
    """This rank's part of a loaded value, which may be distributed in another way, or not at all.

    Collective over the axes on which the value is distributed.
    """
    if spec is None:
        return value
    if not isinstance(value, DTensor) or value.device_mesh != spec.mesh:
        plain = value.full_tensor() if isinstance(value, DTensor) else value
        everywhere = [Replicate()] * spec.mesh.ndim
        value = DTensor.from_local(plain, spec.mesh, everywhere, run_check=False)
    return bytes_of(value.redistribute(placements=spec.placements))


def rows_on_all_axes(value: torch.Tensor, info: DataParallelMeshInfo) -> DTensor | None:
    """This rank's rows of a tensor that is whole on a wrapper's axes, as a tensor on all axes.

    None where the wrapper's mesh is not a part of a larger one. Collective over the other axes.
    """
    root = meshes.root_mesh(info.mesh)
    if root.ndim == info.mesh.ndim:
        return None
    spec, names = spec_of(value), root.mesh_dim_names or ()
    placements: list[Placement] = [Replicate()] * root.ndim
    if spec is not None:
        for name, placement in zip(spec.mesh.mesh_dim_names or (), spec.placements, strict=True):
            placements[names.index(name)] = placement
    everywhere = DTensor.from_local(
        bytes_of(value),
        root,
        placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
    assert info.shard_mesh_dim is not None
    placements[names.index((info.mesh.mesh_dim_names or ())[info.shard_mesh_dim])] = Shard(0)
    return cast(DTensor, everywhere.redistribute(placements=placements))


def groups_of(spec: Spec) -> tuple[dist.ProcessGroup, ...]:
    """The ranks that have other parts of a parameter, for each of its axes."""
    if spec is None:
        return ()
    placements = enumerate(spec.placements)
    return tuple(spec.mesh.get_group(i) for i, p in placements if not p.is_replicate())
