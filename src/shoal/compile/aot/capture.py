"""Capture forward and backward of a function in one joint graph, each node with its phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from shoal._torch import autograd, functionals, settings, subclasses, traces
from shoal._torch import fakes as torch_fakes
from shoal.compile.aot.analyse import Analysis, Function, returned_tensors, run_recorded
from shoal.compile.aot.arrange import Arrangement, Constant
from shoal.compile.aot.random_state import Draws
from shoal.compile.aot.recorder import Effects
from shoal.compile.aot.signature import Output, OutputKind, Signature
from shoal.compile.aot.subclasses import (
    Wrapped,
    Wrappings,
    flat_all,
    places,
    rebuild,
    wrappings_of,
)
from shoal.errors import InvariantError

Decompositions = Mapping[Any, Callable[..., Any]]

FORWARD, BACKWARD = "forward", "backward"

_BY_PLACE = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default)
"""What counts elements from where the memory begins."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A joint graph: primals and tangents in, what forward returns and gradients out."""

    module: GraphModule
    num_forward_outputs: int
    inputs: list[Any]
    """Fake inputs, as the graph takes them."""
    tangents: list[Tensor | None]
    """Fake gradients; None for parts of them that are inputs, which the graph takes once."""
    wrappings: Wrappings

    @property
    def joint_inputs(self) -> tuple[list[Any], list[Any]]:
        """What the graph takes: primals, tangents."""
        return list(self.inputs), [one for one in self.tangents if one is not None]


class LeftFakeError(AssertionError):
    """A program reads a fake tensor that did not come with its arguments."""


class BackwardMutationError(NotImplementedError, AssertionError):
    """Backward changes something in place in a way that cannot be carried out.

    An `AssertionError` too, because that is what torch's own runtime raises.
    """


class _Trace:
    """The function that is traced."""

    def __init__(
        self,
        function: Function,
        arrangement: Arrangement,
        fakes: Sequence[Any],
        analysis: Analysis,
        shared: Sequence[int | None],
        draws: Draws,
    ) -> None:
        self._function = function
        self.arrangement = arrangement
        self._fakes = fakes
        self._analysis = analysis
        self._shared = shared
        self._draws = draws
        self.gradients: Wrapped = ()
        self.clones: list[int] = []
        """The inputs that a copy stood for, because autograd would not let them be written to."""
        self.backward_writes: list[int] = []
        """What backward writes to, among the graph's inputs and then the gradients it takes."""

    def joint(self, primals: list[Any], tangents: list[Any]) -> list[Any]:
        """Forward, then backward."""
        signature = self._analysis.signature
        with functionals.FunctionalTensorMode():
            inputs = rebuild(primals, self._fakes, functionals.functional)
            entering = self._entering(inputs)
            with traces.remember_lines():
                recorded = run_recorded(
                    self._function, self.arrangement, inputs, entering, self._draws
                )
            self._check_same(recorded.classified.signature)
            returned = returned_tensors(signature, recorded, entering)
            values = _values(returned)
            new = _values([entering[i] for i in signature.graph_mutations], symbols=False)
            held = _values(inputs)
            reshaped = _reshaped(inputs)
            # What follows is backward; the trace says so, nobody has to guess.
            for node in traces.traced_nodes():
                node.meta["phase"] = FORWARD
            own = iter(tangents)
            flat = [next(own) if i is None else primals[i] for i in self._shared]
            grads, before, after = self._grads(inputs, returned, flat)
            if _reshaped(inputs) != reshaped:
                raise BackwardMutationError(
                    "an input that had its metadata mutated in the backward, such as by "
                    "transpose_, is not supported. Take a view of it instead."
                )
            self.backward_writes = _changed(held + before, late := _values(inputs) + after)
            changed = [late[i] for i in self.backward_writes]
        return [*values, *recorded.classified.symbols, *new, *grads, *changed]

    def _entering(self, inputs: Sequence[Any]) -> list[Any]:
        entering: list[Any] = []
        for i, (one, spec) in enumerate(zip(inputs, self._analysis.signature.inputs, strict=True)):
            if spec.requires_grad and (spec.mutation.by_autograd or spec.mutation.is_reshaped):
                self.clones.append(i)
                entering.append(_copy_of(one))
            else:
                entering.append(one)
        return entering

    def _check_same(self, signature: Signature) -> None:
        if _settled(signature) != _settled(self._analysis.signature):
            raise InvariantError(
                "the function did not return the same when it was traced as when it was analysed: "
                f"expected {self._analysis.signature.outputs}, got {signature.outputs}. It must "
                "not depend on anything but its arguments."
            )

    def _grads(
        self,
        inputs: Sequence[Any],
        returned: Sequence[Any],
        tangents: Sequence[Tensor],
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Gradients; of those that came in, those of the graph's own, what they held and hold."""
        signature = self._analysis.signature
        if not signature.trains:
            return [], [], []
        outs = [one for one, has in zip(returned, signature.differentiable, strict=True) if has]
        wanted = [i for i, spec in enumerate(signature.inputs) if spec.requires_grad]
        given = rebuild(tangents, self._analysis.tangents, functionals.functional, symbols=False)
        before = _values(given, symbols=False)
        traces.carry_lines(outs)
        self._draws.begin()
        with settings.autocast_of_backward(), Effects(self._draws):
            grads = _differentiate(outs, [inputs[i] for i in wanted], given)
        self._draws.end()
        after = _values(given, symbols=False)
        if any(self._shared[i] is not None for i in _changed(before, after)):
            raise BackwardMutationError(
                "a backward that writes to the gradient that it gets is not supported where that "
                "is a tensor subclass which shares a part with an argument. Clone it first."
            )
        own = [i for i, at in enumerate(self._shared) if at is None]
        by_input = dict(zip(wanted, grads, strict=True))
        listed = [by_input.get(i) for i in range(len(inputs))]
        self.gradients = wrappings_of(listed)
        return _values(listed), [before[i] for i in own], [after[i] for i in own]


def _settled(signature: Signature) -> list[Output]:
    """Outputs, but for which sizes are free: the second run may meet those that the first fixed."""
    return [replace(one, free_dims=()) for one in signature.outputs]


def _differentiate(
    outs: Sequence[Tensor], inputs: Sequence[Tensor], tangents: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    try:
        return torch.autograd.grad(outs, inputs, grad_outputs=tangents, allow_unused=True)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise NotImplementedError(
            "a function whose backward autograd would refuse, because a tensor that it needs was "
            f"written to in place, cannot be compiled with its gradients: {error}"
        ) from error


def _changed(before: Sequence[Any], after: Sequence[Any]) -> list[int]:
    """Which tensors were written to in between: functional ones hold another value then."""
    return [
        i
        for i, (a, b) in enumerate(zip(before, after, strict=True))
        if isinstance(a, Tensor) and a is not b
    ]


def _copy_of(one: Tensor) -> Tensor:
    """A copy that lies in memory as the tensor does: what is asked of its strides is the same."""
    copy = one.clone()
    if subclasses.wraps_others(one) or copy.stride() == one.stride():
        return copy
    strided = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device)
    return strided.copy_(one)


def _reshaped(inputs: Sequence[Any]) -> list[bool]:
    return [functionals.is_reshaped(one) for one in flat_all(inputs) if isinstance(one, Tensor)]


def _values(several: Sequence[Any], *, symbols: bool = True) -> list[Any]:
    """What functional tensors hold now, as the graph sees it."""
    return [
        functionals.value_of(one) if isinstance(one, Tensor) else one
        for one in flat_all(several, symbols=symbols)
    ]


def capture(
    function: Function,
    arrangement: Arrangement,
    fakes: Sequence[Any],
    analysis: Analysis,
    mode: torch_fakes.FakeTensorMode,
    decompositions: Decompositions | None,
) -> Captured:
    """Trace forward and backward into one graph."""
    signature = analysis.signature
    inputs = flat_all(fakes)
    tangents = flat_all(analysis.tangents, symbols=False)
    known = {id(one): i for i, one in enumerate(inputs)}
    shared = [known.get(id(one)) for one in tangents]
    own = [one for one, i in zip(tangents, shared, strict=True) if i is None]
    draws = Draws(analysis.generators)
    trace = _Trace(function, arrangement, fakes, analysis, shared, draws)
    grad_mode = torch.is_grad_enabled()

    def joint(primals: list[Any], tangents: list[Any]) -> list[Any]:
        return trace.joint(primals, tangents)

    def forward(*args: Any) -> list[Any]:
        return trace.joint(list(args), [])

    try:
        with torch_fakes.below_python(mode), draws, autograd.without_outer_hooks():
            if signature.trains:
                with traces.without_fused_rnn():
                    module = traces.trace(joint, (inputs, own), decompositions)
            else:
                module = traces.trace(forward, tuple(inputs), decompositions)
    finally:
        torch.set_grad_enabled(grad_mode)
    wrappings = Wrappings(
        inputs=wrappings_of(fakes),
        returned=analysis.returned,
        tangents=wrappings_of(analysis.tangents),
        gradients=trace.gradients,
    )
    num_forward = _finish(module, trace, signature, wrappings)
    listed = [one if i is None else None for one, i in zip(tangents, shared, strict=True)]
    return Captured(module, num_forward, inputs, listed, wrappings)


def _finish(module: GraphModule, trace: _Trace, signature: Signature, wrappings: Wrappings) -> int:
    """Say of each node in which phase it ran, and put writes to inputs in their place.

    Passes clean up the rest. Returns how many of the graph's results are forward's.
    """
    graph = module.graph
    nodes = list(graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    output = nodes[-1]
    inner = places(wrappings.inputs)
    num_inputs = sum(map(len, inner))
    for node in (*placeholders[num_inputs:], *(n for n in nodes if "phase" not in n.meta)):
        node.meta["phase"] = BACKWARD
    _check_constants(module)
    primals = placeholders[:num_inputs]
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    num_forward = sum(map(len, places(wrappings.returned))) + signature.num_symbols
    written = [at for i in signature.graph_mutations for at in _tensors(wrappings.inputs, i)]
    new = results[num_forward : num_forward + len(written)]
    grads = results[num_forward + len(written) : len(results) - len(trace.backward_writes)]
    changed = results[len(results) - len(trace.backward_writes) :]
    returned = results[:num_forward]
    clones = [at for i in trace.clones for at in inner[i]]
    _drop_clones(primals, clones, {*returned, *new})
    boundary = next(
        (n for n in nodes if n.meta["phase"] == BACKWARD and n.op != "placeholder"), output
    )
    for i in signature.returned_mutations:
        # After the graph, but before backward: what backward reads of it has to be kept apart.
        for at in inner[i]:
            primals[at].meta["written"] = True
    for i in _handed_out(signature, trace.arrangement):
        for at in inner[i]:
            primals[at].meta["handed_out"] = True
    for i, value in zip(written, new, strict=True):
        _write(module, primals[i], value, boundary, FORWARD)
    for i, value in zip(trace.backward_writes, changed, strict=True):
        _write(module, placeholders[i], value, output, BACKWARD)
    output.args = ((*returned, *grads),)
    for i, one in enumerate(signature.inputs):
        for at in inner[i] if one.requires_grad else ():
            primals[at].meta["requires_grad"] = True
    graph.lint()
    return num_forward


def _handed_out(signature: Signature, arrangement: Arrangement) -> set[int]:
    """The inputs that outputs show: callers may write to those before backward."""
    shown = (OutputKind.INPUT, OutputKind.VIEW_OF_INPUT)
    of = (arrangement.places[out.of] for out in signature.outputs if out.kind in shown)
    return {place.input for place in of if not isinstance(place, Constant)}


def _tensors(wrapped: Wrapped, i: int) -> range:
    """Where the tensors of an input are among the graph's inputs, without its symbols."""
    place, wrapping = places(wrapped)[i], wrapped[i]
    return place if wrapping is None else place[: wrapping.num_flat(symbols=False)]


def _check_constants(module: GraphModule) -> None:
    """Refuse fake tensors that came in by another way than the arguments."""
    for node in module.graph.find_nodes(op="get_attr"):
        value = traces.attribute(module, str(node.target))
        if isinstance(value, torch_fakes.FakeTensor):
            raise LeftFakeError(
                f"Unexpected fake tensor in the graph as {node.target}: the function reads one "
                f"that is not among its arguments; got {value}. Pass it as an argument, or use a "
                "real tensor."
            )


def _drop_clones(primals: Sequence[Node], clones: Sequence[int], returned: set[Any]) -> None:
    """The graph writes nothing, so that an input can be read instead of its copy.

    But for what counts elements of memory, which for the copy begins elsewhere.
    """
    for i in clones:
        for user in list(primals[i].users):
            is_clone = user.target is torch.ops.aten.clone.default and not user.kwargs
            if is_clone and user not in returned and user.meta["phase"] == FORWARD:
                user.replace_all_uses_with(
                    primals[i], delete_user_cb=lambda one: one.target not in _BY_PLACE
                )


def _write(module: GraphModule, primal: Node, value: Any, before: Node, phase: str) -> None:
    if value is primal:
        return
    with module.graph.inserting_before(before):
        # Named as by a trace.
        node = module.graph.create_node(
            "call_function", torch.ops.aten.copy_.default, (primal, value), name="copy_"
        )
    node.meta.update(val=primal.meta.get("val"), phase=phase)
    if isinstance(value, Node) and "stack_trace" in value.meta:
        node.meta["stack_trace"] = value.meta["stack_trace"]
