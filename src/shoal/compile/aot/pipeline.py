"""From a function and its arguments to the function that runs instead: the stages in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from shoal import _torch_compile as adapter
from shoal.compile.aot.analyse import Analysis, Function, analyse
from shoal.compile.aot.arrange import Arrangement, arrange
from shoal.compile.aot.capture import Captured, Decompositions, capture
from shoal.compile.aot.emit import emit
from shoal.compile.aot.function import Graphs, make_function
from shoal.compile.aot.graph_code import Boxed

Inner = Callable[[GraphModule, Sequence[Any]], Boxed]
"""Makes a boxed function of a graph; gets fake inputs."""
Partition = Callable[..., tuple[GraphModule, GraphModule]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """What a function is compiled with."""

    forward: Inner
    backward: Inner
    inference: Inner
    partition: Partition
    decompositions: Decompositions | None = None
    dynamic: bool = False

    def compile(self, function: Function, args: Sequence[Any]) -> Callable[..., Any]:
        """The function that does what `function` does with arguments like these."""
        adapter.skip_in_dynamo("shoal.compile.aot")
        mode = adapter.current_fake_mode(args) or adapter.new_fake_mode(dynamic=self.dynamic)
        arrangement = arrange(args)
        analysis, fakes = self._analyse(function, arrangement, args, mode)
        written = {i for i, one in enumerate(analysis.signature.inputs) if one.mutation.data}
        merged = arrangement.with_memory(args, written)
        if merged is not None:
            arrangement = merged
            analysis, fakes = self._analyse(function, arrangement, args, mode)
        captured = capture(function, arrangement, fakes, analysis, mode, self.decompositions)
        if analysis.signature.trains:
            return self._training(arrangement, analysis, captured, fakes)
        run = self.inference(captured.module, fakes)
        return emit(analysis.signature, arrangement, run, boxed=True)

    def _analyse(
        self,
        function: Function,
        arrangement: Arrangement,
        args: Sequence[Any],
        mode: adapter.FakeTensorMode,
    ) -> tuple[Analysis, list[Any]]:
        fakes = [
            adapter.fake_of(mode, one, dynamic=self.dynamic) if isinstance(one, Tensor) else one
            for one in arrangement.inputs(args)
        ]
        return analyse(function, arrangement, fakes, mode), fakes

    def _training(
        self, arrangement: Arrangement, analysis: Analysis, captured: Captured, fakes: list[Any]
    ) -> Callable[..., Any]:
        signature = analysis.signature
        joint = captured.module
        forward, backward = self.partition(
            joint,
            [*fakes, *analysis.tangents],
            num_fwd_outputs=captured.num_forward_outputs,
        )
        saved = _outputs_of(forward)[captured.num_forward_outputs :]
        num_saved = sum(isinstance(node.meta.get("val"), Tensor) for node in saved)
        context = adapter.TracingContext.try_get()
        compile_backward = partial(_compile_later, self.backward, backward, context)
        graphs = Graphs(
            forward=self.forward(forward, fakes),
            backward=compile_backward,
            num_saved=num_saved,
            tangent_strides=tuple(_strides_of(one) for one in analysis.tangents),
        )
        return emit(signature, arrangement, make_function(signature, graphs), boxed=False)


def _compile_later(
    inner: Inner, module: GraphModule, context: adapter.TracingContext | None
) -> Boxed:
    """Compile a backward graph when it is needed, in the context of its forward."""
    fakes = [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]
    with adapter.tracing(context):
        return inner(module, fakes)


def _outputs_of(module: GraphModule) -> list[Any]:
    return list(next(iter(reversed(module.graph.nodes))).args[0])


def _strides_of(tangent: Tensor) -> tuple[int, ...] | None:
    strides = tangent.stride()
    if any(isinstance(one, torch.SymInt) for one in strides):
        return None
    return tuple(strides)
