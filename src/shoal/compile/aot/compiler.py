"""From a function and its arguments to the function that runs instead: the stages in order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from shoal._torch import compilers, dynamo, settings, traces
from shoal._torch import fakes as torch_fakes
from shoal.compile.aot.analyse import analyse
from shoal.compile.aot.arrange import arrange, disjoint_inputs
from shoal.compile.aot.autograd_function import Graphs, make_function
from shoal.compile.aot.call_code import emit
from shoal.compile.aot.capture import Captured, Decompositions, capture
from shoal.compile.aot.classify import Function
from shoal.compile.aot.frame_stack import with_frame_stack
from shoal.compile.aot.graph_code import Boxed, writes_uncounted
from shoal.compile.aot.inner import Inner, Role, Task, functions
from shoal.compile.aot.lowered import Lowered, count_saved, outputs_of, overlapping_gradients
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
    """The stages from a function to its compiled form, with the tools that they use."""

    inner: Inner
    partition: Partition
    decompositions: Decompositions | None = None
    dynamic: bool = False
    checks: bool = False
    """Whether a call checks its arguments: there are no guards of Dynamo's."""
    target: Target = Target.GIVEN
    """The kind of `inner`, which decides how passes rewrite graphs."""

    def compile(self, function: Function, args: Sequence[Any]) -> Callable[..., Any]:
        """`function`, compiled for arguments like these."""
        with observing():
            lowered = self.lower(function, args)
            run = self.build(lowered)
        return where_shared_alike(run, function, lowered, args) if self.checks else run

    def mode_for(self, args: Sequence[Any]) -> torch_fakes.FakeTensorMode:
        """The mode of the fake tensors that stand for arguments."""
        mode = torch_fakes.current_fake_mode(args)
        return mode or torch_fakes.new_fake_mode(dynamic=self.dynamic)

    def lower(
        self, function: Function, args: Sequence[Any], fixed: Collection[int] = ()
    ) -> Lowered:
        """Trace the function, and cut its graph into forward and backward.

        Arguments in `fixed` stay where they are from call to call, as parameters do.
        """
        mode = self.mode_for(args)
        known = torch_fakes.num_fixed_sizes(mode)
        try:
            return self._lower(function, args, fixed, mode)
        except InvariantError:
            if torch_fakes.num_fixed_sizes(mode) == known:
                raise
        # The trace found a size to be a number that was a symbol in the analysis.
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
            analysis = analyse(function, arrangement, args, mode, dynamic=self.dynamic)
            inputs = analysis.signature.inputs
            written = {i for i, one in enumerate(inputs) if one.mutation.data}
            apart = set[int]()
            if written and not any(one.mutation.by_autograd for one in inputs):
                apart = disjoint_inputs(arrangement.inputs(args), analysis.fakes)
            merged = arrangement.with_memory(args, analysis.fakes, written, apart)
            if merged is not None:
                arrangement = merged
                analysis = analyse(function, arrangement, args, mode, dynamic=self.dynamic)
        with stage("capture"):
            captured = capture(analysis, self.decompositions)
            trains = analysis.signature.trains
            run_passes("joint", pipeline.joint(self.target, trains=trains), captured.module)
            captured = _rewritten_by_user(captured, trains=trains)
        say(Topic.GRAPHS, lambda: graph_text("captured", captured.module))
        inner = places(captured.wrappings.inputs)
        stay = tuple(
            at
            for source, moves, place in zip(
                arrangement.sources, arrangement.is_memory, inner, strict=True
            )
            if source in fixed and not moves
            for at in place
        )
        forward, backward = captured.module, None
        if trains:
            with stage("partition"):
                forward, backward = self._cut(captured)
        num_saved, saved_bytes = count_saved(outputs_of(forward)[captured.num_forward_outputs :])
        by_operators = self._run_passes(forward, backward)
        is_direct = self.target is Target.DIRECT
        return Lowered(
            signature=analysis.signature.counted(
                inner,
                by_operators=by_operators or frozenset(),
                uncounted=writes_uncounted(forward.graph) if is_direct else None,
            ),
            arrangement=arrangement,
            wrappings=captured.wrappings,
            forward=forward,
            backward=backward,
            inputs=captured.inputs,
            tangents=captured.tangents,
            fixed=stay,
            num_visible=captured.num_forward_outputs,
            num_saved=num_saved,
            copied=() if backward is None else overlapping_gradients(backward),
            saved_bytes=saved_bytes,
        )

    def build(self, lowered: Lowered) -> Callable[..., Any]:
        """The function that runs the graphs."""
        dynamo.skip_in_dynamo("shoal.compile.aot")
        dynamo.report_compiled()
        backward, number = lowered.backward, next(functions)
        tell_lowered(lowered)
        say(Topic.SIGNATURE, lambda: signature_text(lowered.signature, lowered.arrangement))
        say(Topic.GRAPHS, lambda: graph_text("forward", lowered.forward))
        inner = with_frame_stack(self.inner)
        task = Task(
            module=lowered.forward,
            inputs=lowered.inputs,
            role=Role.INFERENCE if backward is None else Role.FORWARD,
            fixed=lowered.fixed,
            num_visible=lowered.num_visible,
            number=number,
        )
        if backward is None:
            with stage("compile"):
                run = inner(task)
        else:
            say(Topic.GRAPHS, lambda: graph_text("backward", backward))
            say(Topic.PARTITION, lambda: saved_text(lowered))
            with stage("compile"), compilers.reported_strides() as strides:
                forward = inner(task)
            donated = lowered.donated(backward) if self.target is Target.INDUCTOR else ()
            graphs = Graphs(
                lowered=lowered,
                forward=forward,
                backward=_compile_later(inner, lowered, backward, strides, donated, number),
                donates=bool(donated),
                num_symbols=len(lowered.saved) - lowered.num_saved,
                dependence=lowered.dependence(backward.graph),
            )
            run = make_function(graphs)
        return emit(lowered, run, checks=self.checks, autocast=settings.is_autocast())

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
        """Cut a joint graph; our partitions are told of inputs written to before backward reads."""
        module = captured.module
        told: dict[str, Any] = {"num_fwd_outputs": captured.num_forward_outputs}
        inputs = module.graph.find_nodes(op="placeholder")
        written = [i for i, node in enumerate(inputs) if node.meta.get("written")]
        if written and "mutated_inputs" in inspect.signature(self.partition).parameters:
            told["mutated_inputs"] = written
        return self.partition(module, captured.joint_inputs, **told)


def _rewritten_by_user(captured: Captured, *, trains: bool) -> Captured:
    """The joint graph after the user's own pass (`joint_custom_pass`), if one is set."""
    rewrite = settings.joint_pass()
    if rewrite is None or not trains:
        return captured
    module = rewrite(captured.module, captured.joint_inputs)
    module.graph.lint()
    infer_phases(module.graph)
    return replace(captured, module=module)


def _compile_later(
    inner: Inner,
    lowered: Lowered,
    backward: GraphModule,
    strides: Sequence[Any] | None,
    donated: tuple[int, ...],
    number: int,
) -> Callable[[bool], Boxed]:
    """Compiles the backward graph when it is called, in the context of now.

    `strides` are those that the compiler of forward chose for its outputs. The argument of the
    function says whether the graph may write over the inputs in `donated`.
    """
    saved = lowered.saved
    strides = (strides or [])[lowered.num_visible :]
    laid = {node.name: one for node, one in zip(saved, strides, strict=False)}
    inputs = lowered.forward.graph.find_nodes(op="placeholder")
    fixed = {inputs[at].name for at in lowered.fixed}
    taken = backward.graph.find_nodes(op="placeholder")
    handed = tuple(range(len(saved)))
    task = Task(
        module=backward,
        inputs=(),
        role=Role.BACKWARD,
        fixed=tuple(at for at in handed if taken[at].name in fixed),
        handed=handed,
        num_visible=len(outputs_of(backward)),
        number=number,
    )
    context, observation = traces.TracingContext.try_get(), current()

    def compiled(is_last: bool) -> Boxed:
        module = backward
        if donated:
            # There may be another time, and compilers change the graph that they get.
            module = GraphModule(module, copy_graph(module.graph))
        placeholders = module.graph.find_nodes(op="placeholder")
        own = replace(
            task,
            module=module,
            inputs=[_fake(node, laid.get(node.name)) for node in placeholders],
            donated=donated if is_last else (),
        )
        with resumed(observation), stage("compile backward"), traces.tracing(context):
            return inner(own)

    return compiled


def _fake(node: Node, strides: Sequence[Any] | None) -> Any:
    """The value of an input, with the strides that the compiler of forward gave it."""
    value = node.meta.get("val")
    if strides is None or not isinstance(value, Tensor) or tuple(strides) == value.stride():
        return value
    with value.fake_mode:  # type: ignore[attr-defined]
        laid = node.meta["val"] = value.as_strided(value.shape, strides)
    return laid
