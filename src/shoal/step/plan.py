"""A step as a value: the machine, run over an order of units, with the bytes that it moves.

plan = plan_of(model)          # before the first step too: over the declared units
plan.schedule()                # what a step does, action by action
plan.peak_bytes()              # what the engine needs beside shards, gradients and activations
plan.fingerprint               # equal on ranks that do the same
print(plan)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from shoal.errors import UsageError
from shoal.step.action import OF_FULL, ActionKind, described
from shoal.step.machine import Machine
from shoal.step.rehearsal import rehearse
from shoal.step.settings import Settings
from shoal.step.unit_step import UnitStep


@dataclass(frozen=True, slots=True)
class PlannedAction:
    """One entry of a schedule."""

    kind: ActionKind
    unit: str
    num_bytes: int = 0
    """Gathered, reduced, or freed."""

    def __str__(self) -> str:
        return f"{self.kind} {self.unit}"


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
    """One unit: what is communicated together, its memory in bytes, and its settings."""

    name: str
    layout: str
    ranks: tuple[int, ...]
    """Those that shard or replicate it."""
    parameters: tuple[ParameterPlan, ...]
    shard_bytes: int
    """What this rank stores, and sends, unless it is cast or encoded first."""
    gathered_bytes: int
    copies_out: bool
    """Whether gathered bytes are copied once more, to be laid out as parameters."""
    reduced_bytes: int
    """What gradients are reduced from; 0 if nothing is trained."""
    encoded_bytes: int = 0
    """What travels instead of `gathered_bytes`, in a format of few bits."""
    gather_format: str | None = None
    kept_bytes: int = 0
    """This rank's shards as they are sent, where they are kept beside those that are stored."""
    path: tuple[str, ...] = ()
    """Where its module is in the model; a unit runs inside of those whose path begins its own."""
    keeps_piece: bool = False
    """Whether a piece is kept of it between forward and backward."""
    copies_first: bool = False
    """Whether its shards are copied from the host before they are gathered."""
    settings: Settings = field(default_factory=Settings)
    forward_prefetch: tuple[str, ...] | None = None
    """Units that were named to be gathered when its forward begins."""
    backward_prefetch: tuple[str, ...] | None = None

    def described(self, *, frozen: bool = True) -> dict[str, object]:
        """What ranks must have in common, for JSON; with what they freeze, or without."""
        parameters = {p.name: str(p) if frozen else p.kind for p in self.parameters}
        layout = self.layout
        if self.gather_format is not None:
            layout += f", gathered as {self.gather_format}"
        return {"unit": self.name, "layout": layout, "parameters": parameters}


_COMMUNICATED = (
    *("name", "layout", "ranks", "parameters"),
    *("shard_bytes", "gathered_bytes", "encoded_bytes", "copies_out", "reduced_bytes"),
)
"""The fields that ranks must have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The step of one model on one rank."""

    units: tuple[UnitPlan, ...]
    variants: tuple[tuple[str, ...], ...]
    """Orders of forwards by the units' names, newest first; the declared one before the first."""
    roots: frozenset[str]
    """The units of the module that all others are in."""
    _by_name: dict[str, UnitPlan] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name = {unit.name: unit for unit in self.units}
        if len(by_name) != len(self.units):
            raise UsageError("two units of a plan have one name")
        object.__setattr__(self, "_by_name", by_name)

    def schedule(self, variant: int = 0) -> tuple[PlannedAction, ...]:
        """What a training step does, if its forward takes a variant's order.

        The machine runs, on units that are names. It has seen that order before, unless nothing
        was seen. Backward is taken to come to every unit.
        """
        steps = self._steps()
        machine = Machine(list(steps.values()), [steps[name] for name in self.roots])
        order = [steps[name] for name in self.variants[variant]]
        machine.orders.begin()
        for step in order:
            machine.orders.enter(step)
        machine.orders.end()
        paths = {steps[unit.name]: unit.path for unit in self.units}
        actions = rehearse(machine, order, paths)
        return tuple(
            PlannedAction(kind, step.name, self._bytes(kind, step)) for kind, step in actions
        )

    def _bytes(self, kind: ActionKind, step: UnitStep) -> int:
        unit = self._by_name[step.name]
        if kind is ActionKind.GATHER and unit.encoded_bytes:
            return unit.encoded_bytes
        if kind in OF_FULL:
            return unit.gathered_bytes
        if kind in (ActionKind.COPY, ActionKind.DISCARD):
            return unit.shard_bytes
        return unit.reduced_bytes if kind is ActionKind.REDUCE else 0

    def _steps(self) -> dict[str, UnitStep]:
        steps = {unit.name: UnitStep(unit.name) for unit in self.units}

        def named(names: Sequence[str] | None) -> tuple[UnitStep, ...] | None:
            return None if names is None else tuple(steps[name] for name in names)

        for unit in self.units:
            step = steps[unit.name]
            step.is_trained = unit.reduced_bytes > 0
            step.keeps_piece = unit.keeps_piece
            step.copies_first = unit.copies_first
            step.settings = replace(
                unit.settings,
                forward_prefetch=named(unit.forward_prefetch),
                backward_prefetch=named(unit.backward_prefetch),
            )
        return steps

    def peak_bytes(self, variant: int = 0) -> int:
        """The most that full parameters and gradients on their way need at one time."""
        return self._peak_of(self.schedule(variant))

    def _peak_of(self, schedule: Sequence[PlannedAction]) -> int:
        now = peak = 0
        copied: dict[str, int] = {}
        """The bytes of copies from the host that gathers have not read yet."""
        for action in schedule:
            unit = self._by_name[action.unit]
            if action.kind is ActionKind.COPY:
                now += unit.shard_bytes
                copied[unit.name] = unit.shard_bytes
            elif action.kind is ActionKind.DISCARD:
                now -= copied.pop(unit.name)
            elif action.kind is ActionKind.GATHER:
                now += unit.gathered_bytes + unit.encoded_bytes
            elif action.kind is ActionKind.WAIT:
                now -= unit.encoded_bytes
                peak = max(peak, now + unit.gathered_bytes * unit.copies_out)
                now -= copied.pop(unit.name, 0)
            elif action.kind is ActionKind.CANCEL:
                now -= unit.gathered_bytes + unit.encoded_bytes + copied.pop(unit.name, 0)
            elif action.kind in (ActionKind.FREE, ActionKind.KEEP):
                now -= unit.gathered_bytes
            elif action.kind is ActionKind.PACK:
                now += unit.reduced_bytes
            elif action.kind is ActionKind.FINISH:
                now -= unit.reduced_bytes
            peak = max(peak, now)
        return peak

    @property
    def kept_bytes(self) -> int:
        """What shards that are kept in the compute dtype need all the time, beside the peak."""
        return sum(unit.kept_bytes for unit in self.units)

    @property
    def fingerprint(self) -> str:
        """Equal on ranks that communicate the same; says nothing of orders, which come and go."""
        fields = [asdict(unit) for unit in self.units]
        described = [{key: unit[key] for key in _COMMUNICATED} for unit in fields]
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    def __str__(self) -> str:
        """The newest order's schedule, a line each, with the bytes that move or go."""
        schedule = self.schedule()
        peak = self._peak_of(schedule)
        kept = self.kept_bytes
        beside = f" beside {kept / 2**20:.1f} MiB of shards kept in the compute dtype"
        head = f"{len(self.units)} units, {peak / 2**20:.1f} MiB at most{beside if kept else ''}"
        lines = [described(action.kind, action.unit, action.num_bytes) for action in schedule]
        return "\n".join([head, *lines])
