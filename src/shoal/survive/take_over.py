"""A sharded model goes on over other ranks, in place: same modules, same parameters, new groups."""

from __future__ import annotations

from torch import nn

from shoal.errors import UsageError
from shoal.mesh import FSDPMeshInfo, HSDPMeshInfo
from shoal.runtime.module_state import state_of, units_of
from shoal.runtime.parameter_wrapping import DTensorWrapping, ShardedWrapping
from shoal.runtime.unit import Unit


def check_can_move(model: nn.Module) -> list[Unit]:
    """The units of a model that could go on over other ranks; raises where one could not."""
    units = units_of(model)
    if not units:
        raise UsageError(
            "expected a sharded model, got one without any fully_shard: call fully_shard on its "
            "blocks and on the model first (a replicated or plain model has nothing to rebuild)"
        )
    own = {id(parameter) for unit in units for parameter in unit.sharded_parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in own:
            raise UsageError(
                f"parameter {name!r} belongs to no unit, so a rank's death could not be told from "
                "other ranks' values of it: call fully_shard on the whole model too"
            )
    for unit in units:
        reason = _refusal(unit)
        if reason is not None:
            raise NotImplementedError(f"unit {unit.name!r} cannot move to other ranks: {reason}")
    groups = {unit.mesh_info.mesh for unit in units}
    if len(groups) > 1:
        raise NotImplementedError(
            f"units over different meshes cannot move to other ranks together: {groups}"
        )
    return units


def _refusal(unit: Unit) -> str | None:
    info = unit.mesh_info
    if isinstance(info, HSDPMeshInfo) or not isinstance(info, FSDPMeshInfo):
        return f"it is replicated by its mesh {info.mesh}; expected one axis, which shards"
    if info.is_spmd_mesh or info.mesh.ndim != 1:
        return f"its mesh {info.mesh} has other axes; expected one axis, which shards"
    if unit.post is not None:
        return "reshard_after_forward is a number; pass True or False"
    if unit.shards.extended:
        index = min(unit.shards.extended)
        return f"parameter {unit.shards.members[index].spec.name!r} has all-gather hooks"
    for member in unit.shards.members:
        wrapping = member.wrapping
        if isinstance(wrapping, DTensorWrapping) and wrapping.before is not None:
            return f"parameter {member.spec.name!r} is distributed over other axes as well"
        if not isinstance(wrapping, (DTensorWrapping, ShardedWrapping)):
            return "it is wrapped by FullyShardedDataParallel; shard it with fully_shard"
    if unit.in_graph is not None:
        return "it was compiled into a graph, which knows its groups"
    return None


def take_over(model: nn.Module, info: FSDPMeshInfo) -> None:
    """Let all units lie over the ranks of another mesh; the caller fills their shards.

    An unfinished step is forgotten. Nothing communicates, and nothing of the old groups is used.
    """
    for module in model.modules():
        state = state_of(module)
        if state is None:
            continue
        state.forget_context()
        for unit in state.units:
            unit.take_over(info)
