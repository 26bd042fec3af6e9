"""Experts over two meshes: dealt to the ranks of one axis, each sharded over the other axes.

mesh (dp=2, ep=2), 4 experts         ep 0               ep 1
dp 0                          rows 0 of experts 0, 1    rows 0 of experts 2, 3
dp 1                          rows 1 of experts 0, 1    rows 1 of experts 2, 3
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shoal.comm.transport import Transport
from shoal.errors import MeshError, UsageError
from shoal.experts.layer import Experts
from shoal.runtime.fully_shard import fully_shard


def shard_experts(
    experts: Experts, mesh: DeviceMesh, *, expert_axis: str = "ep", **options: Any
) -> Experts:
    """Deal experts to the ranks of one axis, and shard each of them over the other axes.

    The axis takes equal runs of experts; `fully_shard` gets the other axes (one that shards, or
    two: replicate, shard) and `options`. Shards are cut along the second dim, so that any number of
    ranks may share an expert. Gradients are divided by the number of all ranks of the mesh, as
    those of parameters that all of them share: tokens of all ranks reach an expert. The module
    becomes a unit; call it before `fully_shard` on the modules around it. All ranks must run it
    equally often, since tokens are exchanged in forward and in backward.
    """
    names = mesh.mesh_dim_names or ()
    others = tuple(name for name in names if name != expert_axis)
    if expert_axis not in names or not 1 <= len(others) <= 2:
        raise MeshError(
            f"shard_experts needs a mesh with the axis {expert_axis!r} and one or two others, over "
            f"which each expert is sharded (of one rank, if need be); got the axes {names}"
        )
    num_ranks = mesh[expert_axis].size()
    if experts.num_experts % num_ranks:
        raise UsageError(
            f"{experts.num_experts} experts cannot be dealt equally to the {num_ranks} ranks of "
            f"the axis {expert_axis!r}"
        )
    if isinstance(experts.gate, DTensor):
        raise UsageError("shard_experts was called on these experts before")
    _deal(experts, mesh[expert_axis])
    unit = fully_shard(experts, mesh=mesh[others], shard_placement_fn=lambda _: Shard(1), **options)
    unit.set_gradient_divide_factor(float(mesh.size()))
    return experts


def _deal(experts: Experts, mesh: DeviceMesh) -> None:
    """Keep this rank's experts, as a DTensor of all."""
    for name, parameter in list(experts.named_parameters(recurse=False)):
        if parameter.is_meta:
            local = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()]
            dealt = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        else:
            with torch.no_grad():
                dealt = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
        setattr(experts, name, nn.Parameter(dealt, requires_grad=parameter.requires_grad))
    experts.transport = Transport(mesh.get_group())
