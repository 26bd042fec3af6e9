"""Sharding strategies: over which axes a unit is sharded or replicated, and until when it is full.

| strategy | parameters | between forward and backward |
|---|---|---|
| `FULL_SHARD` | sharded | freed |
| `SHARD_GRAD_OP` | sharded | full |
| `NO_SHARD` | replicated | full |
| `HYBRID_SHARD` | sharded on one axis, replicated on the other | freed |
| `_HYBRID_SHARD_ZERO2` | the same | full |
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from shoal._torch import meshes, wrapping
from shoal.errors import UsageError
from shoal.mesh import DataParallelMeshInfo, DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo

HYBRID = frozenset({ShardingStrategy.HYBRID_SHARD, wrapping.HYBRID_SHARD_ZERO2})
FREES = frozenset({ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD})
"""The strategies whose units are freed after forward."""

Groups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """Over which ranks a unit is sharded and replicated."""

    strategy: ShardingStrategy
    mesh_info: DataParallelMeshInfo
    shard_group: dist.ProcessGroup
    """The ranks that share one copy of the parameters; without sharding, all of them."""
    replicate_group: dist.ProcessGroup | None = None
    """The ranks that hold the same shards, if the strategy is hybrid."""

    @property
    def reshard_after_forward(self) -> bool | None:
        """The engine's option: None frees all but the root."""
        return None if self.strategy in FREES else False

    @property
    def process_group(self) -> Groups:
        """The argument of the wrappers inside."""
        hybrid = self.replicate_group
        return self.shard_group if hybrid is None else (self.shard_group, hybrid)

    @property
    def every_group(self) -> tuple[dist.ProcessGroup, ...]:
        """The group between hosts, then the one inside: through both one rank reaches all."""
        hybrid = self.replicate_group
        return (self.shard_group,) if hybrid is None else (hybrid, self.shard_group)


def place(
    strategy: ShardingStrategy | None,
    groups: Groups,
    mesh: DeviceMesh | None,
    device: torch.device,
    *,
    wraps_itself: bool,
) -> Placing:
    """Find the axes of a strategy, from process groups or from a mesh; collective."""
    strategy = strategy or ShardingStrategy.FULL_SHARD
    if groups is not None and mesh is not None:
        raise ValueError(
            "Cannot pass both process_group and device_mesh: pass the one that says who trains"
        )
    if strategy in HYBRID:
        return _place_hybrid(strategy, groups, mesh, device, wraps_itself)
    if isinstance(groups, tuple):
        raise UsageError(
            f"{strategy} takes one process group, got {len(groups)}: two are for HYBRID_SHARD"
        )
    if mesh is not None:
        group = mesh.get_group(0)
        mesh = mesh if mesh.ndim == 1 else DeviceMesh.from_group(group, mesh.device_type)
    else:
        group = groups if groups is not None else dist.group.WORLD
        if group is None:
            raise ValueError(
                "Default process group has not been initialized, please make sure to call "
                "init_process_group before wrapping."
            )
        mesh = (
            DeviceMesh.from_group(group, device.type)
            if isinstance(group, dist.ProcessGroup)  # otherwise there is nobody to talk to
            else meshes.lone_mesh(device.type)
        )
    if group.size() == 1 and strategy is not ShardingStrategy.NO_SHARD:
        warnings.warn(
            f"FSDP is switching to use `NO_SHARD` instead of {strategy} since the world size is 1.",
            stacklevel=4,
        )
        strategy = ShardingStrategy.NO_SHARD
    if not isinstance(group, dist.ProcessGroup):
        info = DataParallelMeshInfo(mesh, replicate_mesh_dim=0)  # nobody to talk to
    elif strategy is ShardingStrategy.NO_SHARD:
        info = DDPMeshInfo(mesh, replicate_mesh_dim=0)
    else:
        info = FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return Placing(strategy=strategy, mesh_info=info, shard_group=group)


def _place_hybrid(
    strategy: ShardingStrategy,
    groups: Groups,
    mesh: DeviceMesh | None,
    device: torch.device,
    wraps_itself: bool,
) -> Placing:
    if mesh is not None:
        if mesh.ndim != 2:
            raise ValueError(
                f"Expected device_mesh to have ndim=2 (replicate, shard) but got {mesh.ndim}"
            )
        found = mesh.get_group(1), mesh.get_group(0)
        named = mesh
    else:
        if groups is None and not wraps_itself:
            raise ValueError(
                f"Manual wrapping with {strategy} requires explicit specification of process "
                "group or device_mesh, so that all wrappers share them"
            )
        found = _groups_per_host(device) if groups is None else groups
        if not (isinstance(found, tuple) and len(found) == 2):
            raise ValueError(
                "Expected process_group to be passed in as either None or "
                f"Tuple[dist.ProcessGroup, dist.ProcessGroup] but got {type(found)}"
            )
        named = _mesh_of(found, device)
    info = HSDPMeshInfo(named, shard_mesh_dim=1, replicate_mesh_dim=0)
    return Placing(
        strategy=strategy, mesh_info=info, shard_group=found[0], replicate_group=found[1]
    )


def _mesh_of(
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup], device: torch.device
) -> DeviceMesh:
    """The mesh whose rows shard and whose columns replicate."""
    shard, replicate = groups
    rows: list[Any] = [None] * replicate.size()
    dist.all_gather_object(rows, dist.get_process_group_ranks(shard), group=replicate)
    if len({len(row) for row in rows}) != 1:
        raise UsageError(
            f"the ranks of one replicate group shard over groups of different sizes: {rows}"
        )
    return DeviceMesh.from_group(
        [replicate, shard],
        device.type,
        mesh=torch.tensor(rows),
        mesh_dim_names=("replicate", "shard"),
    )


def _groups_per_host(device: torch.device) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Shard inside a host, replicate between hosts; every rank makes all groups."""
    per_host = torch.get_device_module(device).device_count()
    world_size = dist.get_world_size()
    if per_host < 1 or world_size % per_host != 0:
        raise UsageError(
            f"HYBRID_SHARD without groups shards inside a host of {per_host} devices, which do not "
            f"divide {world_size} ranks: pass process_group=(shard, replicate) or a device_mesh"
        )
    shard, _ = dist.new_subgroups(per_host)
    replicate, _ = dist.new_subgroups_by_enumeration(
        [list(range(index, world_size, per_host)) for index in range(per_host)]
    )
    assert isinstance(shard, dist.ProcessGroup)
    assert isinstance(replicate, dist.ProcessGroup)
    return shard, replicate
