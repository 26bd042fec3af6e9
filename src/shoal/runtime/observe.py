"""What can be seen of a sharded model: what its steps did, and its plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace

from torch import nn

from shoal.errors import InvariantError, UsageError
from shoal.layout import Even, Layout
from shoal.runtime.collect import check, collect, specs_of
from shoal.runtime.fsdp_module import own_state
from shoal.runtime.fully_shard import modules_of
from shoal.runtime.module_state import context_of, state_of
from shoal.runtime.policy import MixedPrecisionPolicy
from shoal.runtime.rank_guard import describe, plan_unit
from shoal.runtime.recorder import Recorder
from shoal.runtime.unit import Unit
from shoal.step.plan import Plan, UnitPlan
from shoal.step.settings import Settings
from shoal.step.unit_step import UnitStep


@contextmanager
def watch(module: nn.Module, *, named: bool = False) -> Iterator[Recorder]:
    """Record what the model does inside the `with` block, by the names of the machine's actions.

    with watch(model) as recorder:
        model(batch).sum().backward()
    print(recorder)  # and recorder.actions() for their times

    `named=True` names each action in the trace of torch's profiler, too.
    """
    context = context_of(module, own_state(module))
    if not context.units:
        raise UsageError(f"this {type(module).__name__} has no parameters, so nothing to watch")
    if context.recorder is not None:
        raise InvariantError("this model is being watched already; leave the other watch first")
    context.recorder = recorder = Recorder(context.units[0].device, named=named)
    try:
        yield recorder
    finally:
        context.recorder = None


def plan_of(
    module: nn.Module,
    *,
    world: int | None = None,
    units: Sequence[nn.Module | Sequence[nn.Module]] | None = None,
    layout: Layout | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | None = None,
    prefetch_depth: int = 1,
    keep_low_precision_shards: bool = False,
) -> Plan:
    """What a step of a model does, as data: the step machine run over the order of its units.

    Call it on the root. Before the first forward the order is the declared one.

    With `world`, a number of ranks, the model need not be sharded, nor have memory, nor is a
    process group needed: the plan is that of `fully_shard` on each of `units` (modules, or lists
    of modules, from the inside out; by default all members of `nn.ModuleList`s) and then on the
    model, with the arguments that are given here too.
    """
    if world is not None:
        if state_of(module) is not None:
            raise UsageError(
                f"this {type(module).__name__} is sharded, so it has a plan of its own: call "
                "plan_of(model) without world, or plan a model that is not sharded"
            )
        calls = [*(default_units(module) if units is None else units), module]
        policy = mp_policy or MixedPrecisionPolicy()
        settings = Settings(
            reshards_after_forward=reshard_after_forward, prefetch_depth=prefetch_depth
        )
        keeps = keep_low_precision_shards
        return _declared(module, calls, world, layout or Even(), policy, settings, keeps)
    if units is not None:
        raise UsageError("plan_of(model, units=...) needs the number of ranks: world=8")
    context = context_of(module, own_state(module))
    names: dict[UnitStep, str] = {}
    for unit in context.units:
        count = sum(step.name == unit.name for step in names)
        names[unit.step] = unit.name if count == 0 else f"{unit.name} ({count + 1})"
    orders = context.machine.orders.variants
    return Plan(
        units=tuple(_planned(unit, names) for unit in context.units),
        variants=tuple(tuple(names[step] for step in order) for order in orders),
        roots=frozenset(names[unit.step] for unit in context.roots),
    )


def default_units(model: nn.Module) -> list[nn.Module]:
    """The members of all lists of modules, the innermost first."""
    blocks = (list(m) for m in model.modules() if isinstance(m, nn.ModuleList))
    found = dict.fromkeys(block for members in blocks for block in members)
    depths = {module: name.count(".") for name, module in model.named_modules()}
    return sorted(found, key=lambda block: -depths[block])


def _declared(
    model: nn.Module,
    calls: Sequence[nn.Module | Sequence[nn.Module]],
    world: int,
    layout: Layout,
    policy: MixedPrecisionPolicy,
    settings: Settings,
    keeps_low_precision_shards: bool,
) -> Plan:
    """The plan of a model on which `fully_shard` would be called so."""
    if world < 1:
        raise UsageError(f"expected a number of ranks of 1 or more, got world={world}")
    places = {inner: (i, name) for i, (name, inner) in enumerate(model.named_modules())}
    taken: set[nn.Parameter] = set()
    found: list[tuple[int, UnitPlan]] = []
    for call in calls:
        modules = modules_of(call, "plan_of")
        strangers = [type(one).__name__ for one in modules if one not in places]
        if strangers:
            raise UsageError(
                f"units={strangers[0]}: expected modules of the {type(model).__name__} that is "
                "planned, got one that is not inside it"
            )
        params = collect(modules, taken)
        taken.update(item.parameter for item in params)
        check(params)
        if not params:
            continue
        specs = specs_of(params, layout, world)
        packing = layout.pack(specs, world).in_sections()
        position, name = min(places[one] for one in modules)
        unit = describe(
            name=name or "root",
            layout=layout,
            ranks=tuple(range(world)),
            params=specs,
            trained=[item.parameter.requires_grad for item in params],
            policy=policy,
            packing=packing,
            whole=packing,
            keeps_low_precision_shards=keeps_low_precision_shards,
        )
        path = tuple(name.split(".")) if name else ()
        found.append((position, replace(unit, path=path, settings=settings)))
    units = tuple(unit for _, unit in sorted(found, key=lambda one: one[0]))
    return Plan(
        units=units,
        variants=(tuple(unit.name for unit in units),),
        roots=frozenset({"root"} & {unit.name for unit in units}),
    )


def _planned(unit: Unit, names: dict[UnitStep, str]) -> UnitPlan:
    options = unit.options
    settings = {one.name: getattr(options, one.name) for one in fields(Settings)}
    ahead = {
        key: None if (steps := settings.pop(key)) is None else tuple(names[one] for one in steps)
        for key in ("forward_prefetch", "backward_prefetch")
    }
    return replace(
        plan_unit(unit),
        name=names[unit.step],
        path=() if unit.name == "root" else tuple(unit.name.split(".")),
        keeps_piece=unit.step.keeps_piece,
        copies_first=unit.step.copies_first,
        settings=Settings(**settings),
        **ahead,
    )
