"""Capture forward and backward of a function in one joint graph, each node with its phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from shoal._torch import autograd, functionals, settings, subclasses, traces
from shoal._torch import fakes as torch_fakes
from shoal.compile.aot.analyse import Analysis, returned_tensors
from shoal.compile.aot.arrange import Arrangement, Constant
from shoal.compile.aot.classify import RecordedCall
from shoal.compile.aot.random_state import Draws
from shoal.compile.aot.recorder import Effects
from shoal.compile.aot.signature import Output, OutputKind, Signature
from shoal.compile.aot.subclasses import (
    Wrapped,
    Wrappings,
    flat_all,
    num_flat,
    places,
    rebuild,
    wrappings_of,
)
from shoal.errors import InvariantError

Decompositions = Mapping[Any, Callable[..., Any]]

FORWARD, BACKWARD = "forward", "backward"

_BY_PLACE = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default)
"""Operators that count elements from the begin of the memory."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A joint graph: primals and tangents in, results of forward and gradients out."""

    module: GraphModule
    num_forward_outputs: int
    inputs: list[Any]
    """Fake inputs, as the graph takes them."""
    tangents: list[Tensor | None]
    """Fake gradients; None for parts of them that are inputs, which the graph takes once."""
    wrappings: Wrappings

    @property
    def joint_inputs(self) -> tuple[list[Any], list[Any]]:
        """The inputs of the graph: primals, tangents."""
        return list(self.inputs), [one for one in self.tangents if one is not None]


class LeftFakeError(AssertionError):
    """A program reads a fake tensor that did not come with its arguments."""


class BackwardMutationError(NotImplementedError, AssertionError):
    """Backward changes a tensor in place in a way that is not supported.

    Also an `AssertionError`, because torch's own runtime raises that.
    """


@dataclass(slots=True)
class _Trace:
    """The function that is traced: forward, then backward."""

    analysis: Analysis
    shared: Sequence[int | None]
    """For each part of a tangent, the input of the graph that it is; None for its own inputs."""
    draws: Draws
    gradients: Wrapped = ()
    backward_writes: list[int] = field(default_factory=list)
    """The inputs of the graph that backward writes to; its own tangents are counted after them."""

    def joint(self, primals: list[Any], tangents: list[Any]) -> list[Any]:
        """Run the function, differentiate it, and return all results of the joint graph."""
        analysis = self.analysis
        signature = analysis.signature
        with functionals.FunctionalTensorMode():
            inputs = rebuild(primals, analysis.fakes, functionals.functional)
            entering = list(inputs)
            for i in self.copied:
                entering[i] = _copy_of(inputs[i])
            with traces.remember_lines():
                classified = RecordedCall(
                    analysis.function, analysis.arrangement, inputs, entering, self.draws
                ).classify()
            self._check_same(classified.signature)
            returned = returned_tensors(signature, classified, entering)
            values = _values(returned)
            new = _values([entering[i] for i in signature.graph_mutations], symbols=False)
            held = _values(inputs)
            reshaped = _reshaped(inputs)
            # The nodes that follow are of backward.
            for node in traces.traced_nodes():
                node.meta["phase"] = FORWARD
            own = iter(tangents)
            flat = [next(own) if i is None else primals[i] for i in self.shared]
            grads, before, after = self._grads(inputs, returned, flat)
            if _reshaped(inputs) != reshaped:
                raise BackwardMutationError(
                    "an input that had its metadata mutated in the backward, such as by "
                    "transpose_, is not supported. Take a view of it instead."
                )
            self.backward_writes = _changed(held + before, late := _values(inputs) + after)
            changed = [late[i] for i in self.backward_writes]
        return [*values, *classified.symbols, *new, *grads, *changed]

    @property
    def copied(self) -> list[int]:
        """The inputs that a copy stands for, because autograd does not let them be written to."""
        return [
            i
            for i, one in enumerate(self.analysis.signature.inputs)
            if one.requires_grad and (one.mutation.by_autograd or one.mutation.is_reshaped)
        ]

    def _check_same(self, signature: Signature) -> None:
        if _settled(signature) != _settled(self.analysis.signature):
            raise InvariantError(
                "the function did not return the same when it was traced as when it was analysed: "
                f"expected {self.analysis.signature.outputs}, got {signature.outputs}. It must "
                "not depend on anything but its arguments."
            )

    def _grads(
        self, inputs: Sequence[Any], returned: Sequence[Any], tangents: Sequence[Tensor]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Gradients; the values of the graph's tangents before and after they are computed."""
        signature = self.analysis.signature
        if not signature.trains:
            return [], [], []
        outs = [one for one, has in zip(returned, signature.differentiable, strict=True) if has]
        wanted = [i for i, spec in enumerate(signature.inputs) if spec.requires_grad]
        given = rebuild(tangents, self.analysis.tangents, functionals.functional, symbols=False)
        before = _values(given, symbols=False)
        traces.carry_lines(outs)
        self.draws.begin()
        with settings.autocast_of_backward(), Effects(self.draws):
            grads = _differentiate(outs, [inputs[i] for i in wanted], given)
        self.draws.end()
        after = _values(given, symbols=False)
        if any(self.shared[i] is not None for i in _changed(before, after)):
            raise BackwardMutationError(
                "a backward that writes to the gradient that it gets is not supported where that "
                "is a tensor subclass which shares a part with an argument. Clone it first."
            )
        own = [i for i, at in enumerate(self.shared) if at is None]
        by_input = dict(zip(wanted, grads, strict=True))
        listed = [by_input.get(i) for i in range(len(inputs))]
        self.gradients = wrappings_of(listed)
        return _values(listed), [before[i] for i in own], [after[i] for i in own]


def _settled(signature: Signature) -> list[Output]:
    """Outputs without their free sizes: the first run may have fixed some of them."""
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
    """Which tensors were written to: functional tensors have another value then."""
    return [
        i
        for i, (a, b) in enumerate(zip(before, after, strict=True))
        if isinstance(a, Tensor) and a is not b
    ]


def _copy_of(one: Tensor) -> Tensor:
    """A copy with the same strides."""
    copy = one.clone()
    if subclasses.wraps_others(one) or copy.stride() == one.stride():
        return copy
    strided = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device)
    return strided.copy_(one)


def _reshaped(inputs: Sequence[Any]) -> list[bool]:
    return [functionals.is_reshaped(one) for one in flat_all(inputs) if isinstance(one, Tensor)]


def _values(several: Sequence[Any], *, symbols: bool = True) -> list[Any]:
    """The values of functional tensors at this moment, as the graph sees them."""
    return list(map(functionals.value_of, flat_all(several, symbols=symbols)))


def capture(analysis: Analysis, decompositions: Decompositions | None) -> Captured:
    """Trace forward and backward into one graph."""
    inputs = flat_all(analysis.fakes)
    tangents = flat_all(analysis.tangents, symbols=False)
    known = {id(one): i for i, one in enumerate(inputs)}
    shared = [known.get(id(one)) for one in tangents]
    draws = Draws(analysis.generators)
    trace = _Trace(analysis, shared, draws)
    grad_mode = torch.is_grad_enabled()

    def joint(primals: list[Any], tangents: list[Any]) -> list[Any]:
        return trace.joint(primals, tangents)

    def forward(*args: Any) -> list[Any]:
        return trace.joint(list(args), [])

    try:
        with torch_fakes.below_python(analysis.mode), draws, autograd.without_outer_hooks():
            if analysis.signature.trains:
                own = [one for one, i in zip(tangents, shared, strict=True) if i is None]
                with traces.without_fused_rnn():
                    module = traces.trace(joint, (inputs, own), decompositions)
            else:
                module = traces.trace(forward, tuple(inputs), decompositions)
    finally:
        torch.set_grad_enabled(grad_mode)
    wrappings = Wrappings(
        inputs=wrappings_of(analysis.fakes),
        returned=analysis.returned,
        tangents=wrappings_of(analysis.tangents),
        gradients=trace.gradients,
    )
    num_forward = _finish(module, trace, wrappings)
    listed = [one if i is None else None for one, i in zip(tangents, shared, strict=True)]
    return Captured(module, num_forward, inputs, listed, wrappings)


def _finish(module: GraphModule, trace: _Trace, wrappings: Wrappings) -> int:
    """Tag each node with its phase, and put writes to inputs in their place.

    Returns the number of results that are forward's.
    """
    graph, signature = module.graph, trace.analysis.signature
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
    written = [
        at
        for i in signature.graph_mutations
        for at in inner[i][: num_flat(wrappings.inputs[i], symbols=False)]
    ]
    grads_from = num_forward + len(written)
    changed_from = len(results) - len(trace.backward_writes)
    returned, new = results[:num_forward], results[num_forward:grads_from]
    grads, changed = results[grads_from:changed_from], results[changed_from:]
    _drop_clones([primals[at] for i in trace.copied for at in inner[i]], {*returned, *new})
    boundary = next(
        (n for n in nodes if n.meta["phase"] == BACKWARD and n.op != "placeholder"), output
    )
    marks = {
        # After the graph, but before backward: backward has to read a copy of the old value.
        "written": signature.returned_mutations,
        "handed_out": _handed_out(signature, trace.analysis.arrangement),
        "requires_grad": [i for i, one in enumerate(signature.inputs) if one.requires_grad],
    }
    for mark, marked in marks.items():
        for at in (at for i in marked for at in inner[i]):
            primals[at].meta[mark] = True
    for i, value in zip(written, new, strict=True):
        _write(module, primals[i], value, boundary, FORWARD)
    for i, value in zip(trace.backward_writes, changed, strict=True):
        _write(module, placeholders[i], value, output, BACKWARD)
    output.args = ((*returned, *grads),)
    graph.lint()
    return num_forward


def _handed_out(signature: Signature, arrangement: Arrangement) -> set[int]:
    """The inputs that outputs are, or are views of: callers may write to them before backward."""
    shown = (OutputKind.INPUT, OutputKind.VIEW_OF_INPUT)
    of = (arrangement.places[out.of] for out in signature.outputs if out.kind in shown)
    return {place.input for place in of if not isinstance(place, Constant)}


def _check_constants(module: GraphModule) -> None:
    """Refuse fake tensors that are not among the arguments."""
    for node in module.graph.find_nodes(op="get_attr"):
        value = traces.attribute(module, str(node.target))
        if isinstance(value, torch_fakes.FakeTensor):
            raise LeftFakeError(
                f"Unexpected fake tensor in the graph as {node.target}: the function reads one "
                f"that is not among its arguments; got {value}. Pass it as an argument, or use a "
                "real tensor."
            )


def _drop_clones(cloned: Sequence[Node], returned: set[Any]) -> None:
    """Let forward read inputs instead of their copies, since the graph writes to none of them.

    Operators that count elements from the begin of the memory still read the copy.
    """
    for primal in cloned:
        for user in list(primal.users):
            is_clone = user.target is torch.ops.aten.clone.default and not user.kwargs
            if is_clone and user not in returned and user.meta["phase"] == FORWARD:
                user.replace_all_uses_with(
                    primal, delete_user_cb=lambda one: one.target not in _BY_PLACE
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
