"""What a unit is, as the value that plans and guards read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.step.plan import ParameterPlan, UnitPlan

if TYPE_CHECKING:
    from shoal.runtime.unit import Unit


def plan_unit(unit: Unit) -> UnitPlan:
    """Describe a unit, whether it has run or not."""
    policy, members = unit.policy, unit.shards.members
    packing = unit.shards.packing
    compute = [policy.compute_dtype(param.dtype) for param in packing.params]
    gathered = packing.with_dtypes(compute)
    trained = [i for i, member in enumerate(members) if member.sharded.requires_grad]
    reduced_bytes = 0
    if trained:
        dtype = policy.reduce_dtype or compute[trained[0]]
        reduced_bytes = unit.shards.whole.with_dtypes([dtype] * len(members)).gathered_bytes
    return UnitPlan(
        name=unit.name,
        layout=repr(unit.layout),
        ranks=tuple(sorted(unit.mesh_info.mesh.mesh.flatten().tolist())),
        parameters=tuple(
            ParameterPlan(
                name=member.spec.name,
                shape=tuple(member.spec.shape),
                dtype=str(member.spec.dtype),
                is_trained=member.sharded.requires_grad,
            )
            for member in members
        ),
        shard_bytes=packing.shard_bytes,
        gathered_bytes=gathered.gathered_bytes,
        copies_out=any(gathered.gathered_offset(i) is None for i in range(len(members))),
        reduced_bytes=reduced_bytes,
    )
