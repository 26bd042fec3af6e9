"""A step as a value: which units, laid out how, in which order, through how many bytes.

    plan = plan_of(model)          # before the first step too: derived from the declared units
    plan.schedule()                # what a step does, action by action
    plan.peak_bytes()              # what the engine needs beside shards, gradients and activations
    plan.fingerprint               # equal on ranks that do the same

The engine works from its units; this is what others read: the guard that compares ranks, reports,
and whoever wants to know before a long run.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from shoal.errors import UsageError
from shoal.runtime.schedule import Action, ActionKind, derive

if TYPE_CHECKING:
    from shoal.runtime.unit import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlan:
    """One parameter, as all ranks must have it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_trained: bool

    @property
    def kind(self) -> str:
        """Its dtype and shape."""
        return f"{self.dtype} {list(self.shape)}"

    def __str__(self) -> str:
        return f"{self.kind}, {'trained' if self.is_trained else 'frozen'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """One unit: what is communicated together, and its memory in bytes."""

    name: str
    layout: str
    ranks: tuple[int, ...]
    """Those that shard or replicate it."""
    parameters: tuple[ParameterPlan, ...]
    shard_bytes: int
    """What this rank sends."""
    gathered_bytes: int
    copies_out: bool
    """Whether gathered bytes are copied once more, to be laid out as parameters."""
    reduced_bytes: int
    """What gradients are reduced from; 0 if nothing is trained."""

    @classmethod
    def of(cls, unit: Unit) -> UnitPlan:
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
        return cls(
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

    def described(self, *, frozen: bool = True) -> dict[str, object]:
        """What ranks must have in common, for JSON; with what they freeze, or without."""
        parameters = {p.name: str(p) if frozen else p.kind for p in self.parameters}
        return {"unit": self.name, "layout": self.layout, "parameters": parameters}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The step of one model on one rank."""

    units: tuple[UnitPlan, ...]
    variants: tuple[tuple[str, ...], ...]
    """Orders of forwards by the units' names, newest first; the declared one before the first."""
    roots: frozenset[str]
    kept: frozenset[str] = frozenset()
    """Units that are held from forward to backward; the roots, unless it was said otherwise."""
    max_reductions: int = 1
    _by_name: dict[str, UnitPlan] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name = {unit.name: unit for unit in self.units}
        if len(by_name) != len(self.units):
            raise UsageError("two units of a plan have one name")
        object.__setattr__(self, "_by_name", by_name)

    def schedule(self, variant: int = 0) -> tuple[Action, ...]:
        """What a training step does, if its forward takes a variant's order."""
        return derive(
            self.variants[variant],
            roots=self.roots,
            kept=self.kept,
            frozen={unit.name for unit in self.units if unit.reduced_bytes == 0},
            max_reductions=self.max_reductions,
        )

    def peak_bytes(self, variant: int = 0) -> int:
        """The most that full parameters and gradients on their way need at one time."""
        now = peak = 0
        for action in self.schedule(variant):
            unit = self._by_name[action.unit]
            if action.kind is ActionKind.GATHER:
                now += unit.gathered_bytes
            elif action.kind is ActionKind.WAIT and unit.copies_out:
                peak = max(peak, now + unit.gathered_bytes)
            elif action.kind is ActionKind.FREE:
                now -= unit.gathered_bytes
            elif action.kind is ActionKind.REDUCE:
                now += unit.reduced_bytes
            elif action.kind is ActionKind.FINISH:
                now -= unit.reduced_bytes
            peak = max(peak, now)
        return peak

    @property
    def fingerprint(self) -> str:
        """Equal on ranks that communicate the same; says nothing of orders, which come and go."""
        described = json.dumps([asdict(unit) for unit in self.units], sort_keys=True)
        return hashlib.sha256(described.encode()).hexdigest()
