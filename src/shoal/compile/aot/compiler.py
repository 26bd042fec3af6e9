"""From a function and its arguments to the function that runs instead: the stages in order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from shoal._torch import compilers, dynamo, settings, traces
from shoal._torch import fakes as torch_fakes
from shoal.compile.aot.analyse import Analysis, Function, analyse
from shoal.compile.aot.arrange import Arrangement, arrange, disjoint_inputs
from shoal.compile.aot.autograd_function import Graphs, make_function
from shoal.compile.aot.backward_facts import dependence_of, donated_by, overlapping_gradients
from shoal.compile.aot.call_code import emit
from shoal.compile.aot.capture import Captured, Decompositions, capture
from shoal.compile.aot.frame_stack import with_frame_stack
from shoal.compile.aot.graph_code import Boxed, writes_uncounted
from shoal.compile.aot.inner import Inner, Role, Task, functions
from shoal.compile.aot.lowered import Lowered, count_saved, outputs_of
from shoal.compile.aot.sharing import where_shared_alike
from shoal.compile.aot.subclasses import places
from shoal.compile.observe.logs import Topic
from shoal.compile.observe.observation import (
    current,
    observing,
    resumed,
    run_passes,
    say,
    stage,
    tell_lowered,
)
from shoal.compile.observe.text import graph_text, saved_text, signature_text
from shoal.compile.partition.prepare import copy_graph, infer_phases
from shoal.compile.passes import pipeline
from shoal.compile.passes.operator_writes import write_by_operators
from shoal.compile.passes.pipeline import Target
from shoal.errors import InvariantError

Partition = Callable[..., tuple[GraphModule, GraphModule]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AotCompiler:
    """What a function is compiled with."""

    inner: Inner
    partition: Partition
    decompositions: Decompositions | None = None
    dynamic: bool = False
    checks: bool = False
    """Whether a call checks its arguments, because nobody in front of it does."""
    target: Target = Target.GIVEN
    """What `inner` is, for passes: these rewrite graphs for it."""

    def compile(
        self, function: Function, args: Sequence[Any], fixed: Collection[int] = ()
    ) -> Callable[..., Any]:
        """The function that does what `function` does with arguments like these.

        Those in `fixed` stay where they are from call to call, as parameters do.
        """
        with observing():
            lowered = self.lower(function, args, fixed)
            run = self.build(lowered)
        if not self.checks:
            return run
        return where_shared_alike(run, function, lowered, args, fixed)

    def mode_for(self, args: Sequence[Any]) -> torch_fakes.FakeTensorMode:
        """The mode that the fake tensors of arguments live in."""
        return torch_fakes.current_fake_mode(args) or torch_fakes.new_fake_mode(
            dynamic=self.dynamic
        )

    def lower(
        self, function: Function, args: Sequence[Any], fixed: Collection[int] = ()
    ) -> Lowered:
        """Trace the function, and cut its graph into forward and backward."""
        mode = self.mode_for(args)
        known = torch_fakes.num_fixed_sizes(mode)
        try:
            return self._lower(function, args, fixed, mode)
        except InvariantError:
            if torch_fakes.num_fixed_sizes(mode) == known:
                raise
        # A size that was fixed on the way was free in one run and a number in the next.
        return self._lower(function, args, fixed, mode)

    def _lower(
        self,
        function: Function,
        args: Sequence[Any],
        fixed: Collection[int],
        mode: torch_fakes.FakeTensorMode,
    ) -> Lowered:
        arrangement = arrange(args)
        with stage("analyse"):
            analysis, fakes = self._analyse(function, arrangement, args, mode)
            inputs = analysis.signature.inputs
            written = {i for i, one in enumerate(inputs) if one.mutation.data}
            apart = set[int]()
            if written and not any(one.mutation.by_autograd for one in inputs):
                apart = disjoint_inputs(arrangement.inputs(args), fakes)
            merged = arrangement.with_memory(args, written, apart=apart)
            if merged is not None:
                merged.settle(arrangement, fakes)
                arrangement = merged
                analysis, fakes = self._analyse(function, arrangement, args, mode)
        with stage("capture"):
            captured = capture(function, arrangement, fakes, analysis, mode, self.decompositions)
            trains = analysis.signature.trains
            run_passes("joint", pipeline.joint(self.target, trains=trains), captured.module)
            captured = _rewritten_by_user(captured, trains=trains)
        say(Topic.GRAPHS, lambda: graph_text("captured", captured.module))
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
        forward, backward = captured.module, None
        num_saved = saved_bytes = 0
        if trains:
            with stage("partition"):
                forward, backward = self._cut(captured)
            saved = outputs_of(forward)[captured.num_forward_outputs :]
            num_saved, saved_bytes = count_saved(saved)
        inner = places(captured.wrappings.inputs)
        by_operators = self._run_passes(forward, backward)
        signature = analysis.signature.counted_by_operators(by_operators, inner)
        if self.target is Target.DIRECT:
            signature = signature.counted(writes_uncounted(forward.graph), inner)
        return Lowered(
            signature=signature,
            arrangement=arrangement,
            wrappings=captured.wrappings,
            forward=forward,
            backward=backward,
            inputs=captured.inputs,
            tangents=captured.tangents,
            fixed=stay,
            num_visible=captured.num_forward_outputs,
            num_saved=num_saved,
            copied=() if backward is None else overlapping_gradients(backward.graph),
            saved_bytes=saved_bytes,
        )

    def build(self, lowered: Lowered) -> Callable[..., Any]:
        """The function that runs the graphs."""
        dynamo.skip_in_dynamo("shoal.compile.aot")
        dynamo.report_compiled()
        signature, arrangement = lowered.signature, lowered.arrangement
        tell_lowered(lowered)
        say(Topic.SIGNATURE, lambda: signature_text(signature, arrangement))
        say(Topic.GRAPHS, lambda: graph_text("forward", lowered.forward))
        number = next(functions)
        inner = with_frame_stack(self.inner)
        around = partial(
            emit, signature, arrangement, checks=self.checks, autocast=settings.is_autocast()
        )
        task = Task(
            module=lowered.forward,
            inputs=lowered.inputs,
            role=Role.INFERENCE if lowered.backward is None else Role.FORWARD,
            fixed=lowered.fixed,
            num_visible=lowered.num_visible,
            number=number,
        )
        if lowered.backward is None:
            with stage("compile"):
                run = inner(task)
            return around(run=run, graph=lowered.wrappings)
        backward = lowered.backward
        say(Topic.GRAPHS, lambda: graph_text("backward", backward))
        say(Topic.PARTITION, lambda: saved_text(lowered))
        with stage("compile"), compilers.reported_strides() as strides:
            run = inner(task)
        donated = donated_by(lowered, backward) if self.target is Target.INDUCTOR else ()
        graphs = Graphs(
            forward=run,
            backward=_LazyBackward(
                inner, lowered, backward, strides, donated=donated, number=number
            ),
            donates=bool(donated),
            num_saved=lowered.num_saved,
            num_symbols=len(lowered.saved) - lowered.num_saved,
            free_dims=lowered.free_dims,
            tangents=lowered.tangents,
            dependence=dependence_of(backward.graph, lowered.tangents, lowered.wrappings),
            copied=lowered.copied,
            writes_late=lowered.writes_late,
            wrappings=lowered.wrappings,
        )
        return around(run=make_function(signature, graphs))

    def _analyse(
        self,
        function: Function,
        arrangement: Arrangement,
        args: Sequence[Any],
        mode: torch_fakes.FakeTensorMode,
    ) -> tuple[Analysis, list[Any]]:
        fakes = [
            torch_fakes.fake_of(mode, one, dynamic=self.dynamic) if isinstance(one, Tensor) else one
            for one in arrangement.inputs(args)
        ]
        return analyse(function, arrangement, fakes, mode), fakes

    def _written_later(self, joint: GraphModule) -> dict[str, Any]:
        """What partitions of ours are told of: inputs that are written to before backward reads."""
        inputs = [node for node in joint.graph.nodes if node.op == "placeholder"]
        written = [i for i, node in enumerate(inputs) if node.meta.get("written")]
        takes = inspect.signature(self.partition).parameters
        return {"mutated_inputs": written} if written and "mutated_inputs" in takes else {}

    def _run_passes(self, forward: GraphModule, backward: GraphModule | None) -> Any:
        """Run the passes over both graphs; the inputs that custom operators alone write to."""
        report = run_passes("forward", pipeline.forward(self.target), forward)
        if backward is not None:
            run_passes("backward", pipeline.backward(self.target), backward)
        if self.target is Target.INDUCTOR:
            # It finds these writes by itself, and wants its graph as it is.
            return write_by_operators(copy_graph(forward.graph))
        return report.result_of("write_by_operators")

    def _cut(self, captured: Captured) -> tuple[GraphModule, GraphModule]:
        return self.partition(
            captured.module,
            captured.joint_inputs,
            num_fwd_outputs=captured.num_forward_outputs,
            **self._written_later(captured.module),
        )


def _rewritten_by_user(captured: Captured, *, trains: bool) -> Captured:
    """What the pass over joint graphs makes of one that the user has set, if any."""
    rewrite = settings.joint_pass()
    if rewrite is None or not trains:
        return captured
    module = rewrite(captured.module, captured.joint_inputs)
    module.graph.lint()
    infer_phases(module.graph)
    return replace(captured, module=module)


class _LazyBackward:
    """Compiles a backward graph when it is needed, in the context of its forward."""

    def __init__(
        self,
        inner: Inner,
        lowered: Lowered,
        module: GraphModule,
        strides: Sequence[Any] | None,
        *,
        donated: tuple[int, ...],
        number: int,
    ) -> None:
        self._inner = inner
        self._module = module
        self._donated = donated
        self._number = number
        self._num_outputs = len(outputs_of(module))
        saved, laid = lowered.saved, (strides or [])[lowered.num_visible :]
        self._strides = {node.name: one for node, one in zip(saved, laid, strict=False)}
        inputs = lowered.forward.graph.find_nodes(op="placeholder")
        fixed = {inputs[at].name for at in lowered.fixed}
        taken = [node.name for node in module.graph.find_nodes(op="placeholder")]
        self._handed = tuple(range(len(saved)))
        self._fixed = tuple(at for at in self._handed if taken[at] in fixed)
        self._context = traces.TracingContext.try_get()
        self._observation = current()

    def __call__(self, is_last: bool) -> Boxed:
        module = self._module
        if self._donated:
            # There may be another time, and compilers change what they are given.
            module = GraphModule(module, copy_graph(module.graph))
        fakes = [self._fake(n) for n in module.graph.nodes if n.op == "placeholder"]
        task = Task(
            module=module,
            inputs=fakes,
            role=Role.BACKWARD,
            fixed=self._fixed,
            handed=self._handed,
            donated=self._donated if is_last else (),
            num_visible=self._num_outputs,
            number=self._number,
        )
        with resumed(self._observation), stage("compile backward"):
            with traces.tracing(self._context):
                return self._inner(task)

    def _fake(self, node: Node) -> Any:
        """What was saved, as the compiler of forward has laid it out."""
        value, strides = node.meta.get("val"), self._strides.get(node.name)
        if strides is None or not isinstance(value, Tensor) or tuple(strides) == value.stride():
            return value
        with value.fake_mode:  # type: ignore[attr-defined]
            laid = node.meta["val"] = value.as_strided(value.shape, strides)
        return laid
