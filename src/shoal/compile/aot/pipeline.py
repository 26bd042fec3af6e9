"""From a function and its arguments to the function that runs instead: the stages in order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from shoal import _torch_compile as adapter
from shoal.compile.aot.analyse import Analysis, Function, analyse
from shoal.compile.aot.arrange import Arrangement, arrange
from shoal.compile.aot.capture import Captured, Decompositions, capture
from shoal.compile.aot.emit import emit
from shoal.compile.aot.function import Graphs, make_function
from shoal.compile.aot.graph_code import Boxed
from shoal.compile.aot.inner import Inner, Role, Task
from shoal.compile.aot.signature import Signature
from shoal.compile.aot.subclasses import places

Partition = Callable[..., tuple[GraphModule, GraphModule]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """What a function is compiled with."""

    inner: Inner
    partition: Partition
    decompositions: Decompositions | None = None
    dynamic: bool = False

    def compile(
        self, function: Function, args: Sequence[Any], fixed: Collection[int] = ()
    ) -> Callable[..., Any]:
        """The function that does what `function` does with arguments like these.

        Those in `fixed` stay where they are from call to call, as parameters do.
        """
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
        signature = analysis.signature
        stay = tuple(
            at
            for source, moves, place in zip(
                arrangement.sources,
                arrangement.is_memory,
                places(captured.wrappings.inputs),
                strict=True,
            )
            if source in fixed and not moves
            for at in place
        )
        if signature.trains:
            return emit(signature, arrangement, self._training(signature, captured, stay))
        task = Task(
            module=captured.module,
            inputs=captured.inputs,
            role=Role.INFERENCE,
            fixed=stay,
            num_visible=captured.num_forward_outputs,
        )
        return emit(signature, arrangement, self.inner(task), graph=captured.wrappings)

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

    def _written_later(self, joint: GraphModule) -> dict[str, Any]:
        """What partitions of ours are told of: inputs that are written to before backward reads."""
        inputs = [node for node in joint.graph.nodes if node.op == "placeholder"]
        written = [i for i, node in enumerate(inputs) if node.meta.get("written")]
        takes = inspect.signature(self.partition).parameters
        return {"mutated_inputs": written} if written and "mutated_inputs" in takes else {}

    def _training(
        self, signature: Signature, captured: Captured, fixed: tuple[int, ...]
    ) -> Callable[..., Any]:
        num_visible = captured.num_forward_outputs
        forward, backward = self.partition(
            captured.module,
            [*captured.inputs, *captured.tangents],
            num_fwd_outputs=num_visible,
            **self._written_later(captured.module),
        )
        saved = _outputs_of(forward)[num_visible:]
        task = Task(
            module=forward,
            inputs=captured.inputs,
            role=Role.FORWARD,
            fixed=fixed,
            num_visible=num_visible,
        )
        with adapter.reported_strides() as strides:
            run = self.inner(task)
        graphs = Graphs(
            forward=run,
            backward=_Later(
                self.inner,
                backward,
                {
                    n.name: laid
                    for n, laid in zip(saved, (strides or [])[num_visible:], strict=False)
                },
                num_fixed=len(saved),
            ),
            num_saved=sum(isinstance(node.meta.get("val"), Tensor) for node in saved),
            tangents=captured.tangents,
            wrappings=captured.wrappings,
        )
        return make_function(signature, graphs)


class _Later:
    """Compiles a backward graph when it is needed, in the context of its forward."""

    def __init__(
        self, inner: Inner, module: GraphModule, strides: dict[str, Any], *, num_fixed: int
    ) -> None:
        self._inner = inner
        self._module = module
        self._strides = strides
        self._num_fixed = num_fixed
        self._context = adapter.TracingContext.try_get()

    def __call__(self) -> Boxed:
        fakes = [self._fake(n) for n in self._module.graph.nodes if n.op == "placeholder"]
        task = Task(
            module=self._module,
            inputs=fakes,
            role=Role.BACKWARD,
            fixed=tuple(range(self._num_fixed)),
        )
        with adapter.tracing(self._context):
            return self._inner(task)

    def _fake(self, node: Node) -> Any:
        """What was saved, as the compiler of forward has laid it out."""
        value, strides = node.meta.get("val"), self._strides.get(node.name)
        if strides is None or not isinstance(value, Tensor) or tuple(strides) == value.stride():
            return value
        with value.fake_mode:  # type: ignore[attr-defined]
            laid = node.meta["val"] = value.as_strided(value.shape, strides)
        return laid


def _outputs_of(module: GraphModule) -> list[Any]:
    return list(next(iter(reversed(module.graph.nodes))).args[0])
