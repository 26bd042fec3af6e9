"""`torch.compile(backend="shoal")`: what Dynamo calls with a graph of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from shoal import _torch_compile as adapter
from shoal.compile.aot.pipeline import Pipeline
from shoal.compile.inner import inner_named
from shoal.compile.options import Options
from shoal.compile.partition import default_partition, min_cut_rematerialization_partition


def shoal(
    module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's."""
    chosen = Options.of(options)
    function, lifted = lift_attributes(module)
    compiled = pipeline_of(chosen).compile(function, [*lifted, *example_inputs])
    return partial(compiled, *lifted) if lifted else compiled


def pipeline_of(options: Options) -> Pipeline:
    """The stages that options ask for."""
    name = options.inner
    return Pipeline(
        forward=inner_named(name),
        backward=inner_named(name, backward=True),
        inference=inner_named(name, inference=True),
        partition=partial(min_cut_rematerialization_partition, memory_budget=options.memory_budget)
        if options.partition == "min_cut"
        else default_partition,
        decompositions=adapter.inductor_decompositions() if name == "inductor" else None,
    )


def lift_attributes(module: GraphModule) -> tuple[Callable[..., Any], list[Tensor]]:
    """The graph as a function of its tensors too, which Dynamo left on the module."""
    names = [
        str(node.target)
        for node in module.graph.nodes
        if node.op == "get_attr" and isinstance(adapter.attribute(module, str(node.target)), Tensor)
    ]
    names = list(dict.fromkeys(names))
    lifted = [adapter.attribute(module, name) for name in names]

    class Lifted(torch.fx.Interpreter):
        def __init__(self, given: Mapping[str, Any]) -> None:
            super().__init__(module)
            self._given = given

        def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target in self._given:
                return self._given[target]
            return super().get_attr(target, args, kwargs)

    def run(*args: Any) -> Any:
        given = dict(zip(names, args, strict=False))
        with adapter.keep_metadata():
            return Lifted(given).run(*args[len(names) :])

    return run, lifted
