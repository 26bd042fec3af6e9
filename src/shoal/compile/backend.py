"""`torch.compile(backend="shoal")`: compile a graph that Dynamo captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from shoal._torch import autograd, compilers, dynamo, traces
from shoal.compile.aot.compiler import AotCompiler
from shoal.compile.aot.inner import Inductor, directly
from shoal.compile.aot.sharing import guard_sharing, where_shared_alike
from shoal.compile.cache.lookup import lower_cached
from shoal.compile.communication import schedule_collectives
from shoal.compile.compare_ranks import check_ranks_agree
from shoal.compile.lowering.graph_unit import graph_unit_at, prefetch_depth_of
from shoal.compile.observe.dynamo import news
from shoal.compile.observe.logs import Topic
from shoal.compile.observe.observation import count_calls, observing, say, tell
from shoal.compile.observe.text import graph_text
from shoal.compile.options import BackendOptions
from shoal.compile.partition.partitioners import (
    default_partition,
    min_cut_rematerialization_partition,
)
from shoal.compile.passes.pipeline import Target

_MODES: dict[str | None, dict[str, Any]] = {
    None: {},
    "default": {},
    "reduce-overhead": {"inner": "inductor", "cudagraphs": True},
}
"""What the modes of `torch.compile` mean here."""


def shoal(
    module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's."""
    if autograd.inside_compiled_autograd():
        raise NotImplementedError(
            "torch.compile(backend='shoal') does not take the backwards that compiled autograd "
            "captures: give that another backend, or switch it off "
            "(torch._dynamo.config.compiled_autograd = False). shoal compiles the backwards of its "
            "own graphs with them."
        )
    if mode not in _MODES:
        raise NotImplementedError(
            f"torch.compile(backend='shoal', mode={mode!r}) is not supported; there are "
            f"{', '.join(repr(one) for one in _MODES if one)}"
        )
    chosen = BackendOptions.of({**_MODES[mode], **(options or {})})
    function, lifted = lift_attributes(module)
    fixed = [*range(len(lifted)), *(len(lifted) + i for i in dynamo.fixed_inputs(module))]
    args = [*lifted, *example_inputs]
    compiler = compiler_of(chosen)
    # Tracing differentiates, which is nobody's backward.
    with autograd.without_compiled_autograd(), observing(chosen.logs):
        tell(where=dynamo.first_line(module), num_nodes_before=count_calls(module))
        say(Topic.BREAKS, news.text)
        say(Topic.GRAPHS, lambda: graph_text("from Dynamo", module))
        if chosen.cache:
            lowered = lower_cached(compiler, chosen, module, function, args, fixed)
        else:
            lowered = compiler.lower(function, args, fixed)
        units = [unit for arg in args if (unit := graph_unit_at(arg)) is not None]
        schedule_collectives(lowered, chosen, prefetch_depth_of(units))
        check_ranks_agree(lowered)
        compiled = compiler.build(lowered)
        compiled = where_shared_alike(compiled, function, lowered, args, fixed)
        sources = [*(None for _ in lifted), *dynamo.sources_of(module)]
        guard_sharing(lowered, args, sources, fixed)
        compiled = with_shards_of_now(compiled, args)
    return partial(compiled, *lifted) if lifted else compiled


def with_shards_of_now(run: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
    """`run`, given the shards of sharded units where they lie when it is called.

    Dynamo does not see parameters that were moved or replaced: they are no inputs of the graph. Nor
    can a shard's gradient tell for which parameters it is; `run` has been traced, which told.
    """
    units = [(place, graph_unit_at(arg)) for place, arg in enumerate(args)]
    reached = [(place, unit.take_reached()) for place, unit in units if unit is not None]
    if not reached:
        return run
    # They are looked at by each call below, and need not be by Dynamo.
    dynamo.forget_inner_guards(one for _, unit in units if unit for one in unit.sharded)

    def call(*values: Any) -> Any:
        given = list(values)
        for place, indices in reached:
            unit = graph_unit_at(given[place])
            if unit is not None:
                given[place] = unit.marked(unit.follow(), indices)
        return run(*given)

    return call


def compiler_of(options: BackendOptions) -> AotCompiler:
    """The stages that options ask for."""
    is_inductor = options.inner == "inductor"
    return AotCompiler(
        inner=Inductor(cudagraphs=options.cudagraphs) if is_inductor else directly,
        partition=partial(min_cut_rematerialization_partition, memory_budget=options.memory_budget)
        if options.partition == "min_cut"
        else default_partition,
        decompositions=compilers.inductor_decompositions() if is_inductor else None,
        target=Target(options.inner),
    )


def lift_attributes(module: GraphModule) -> tuple[Callable[..., Any], list[Tensor]]:
    """The graph as a function of its tensors too, which Dynamo left on the module."""
    found = {
        name: traces.attribute(module, name)
        for name in (str(node.target) for node in module.graph.find_nodes(op="get_attr"))
    }
    lifted = {name: one for name, one in found.items() if isinstance(one, Tensor)}

    class Lifted(traces.Replay):
        def __init__(self, given: Mapping[str, Any]) -> None:
            super().__init__(module)
            self._given = given

        def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target in self._given:
                return self._given[target]
            return super().get_attr(target, args, kwargs)

    def run(*args: Any) -> Any:
        given = dict(zip(lifted, args, strict=False))
        with traces.keep_metadata():
            return Lifted(given).run(*args[len(lifted) :])

    return run, list(lifted.values())
