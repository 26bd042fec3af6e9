"""The graph of a function: forward and backward in one trace, every node tagged while tracing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from shoal import _torch_compile as adapter
from shoal.compile.aot.analyse import (
    Analysis,
    Function,
    functional_inputs,
    returned_tensors,
    run_watched,
)
from shoal.compile.aot.arrange import Arrangement
from shoal.compile.aot.signature import Signature
from shoal.errors import InvariantError

Decompositions = Mapping[Any, Callable[..., Any]]

FORWARD, BACKWARD = "forward", "backward"

_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


@dataclass(frozen=True, slots=True)
class Captured:
    """A joint graph: primals and tangents in, what forward returns and gradients out."""

    module: GraphModule
    num_forward_outputs: int


class _Trace:
    """The function that is traced."""

    def __init__(self, function: Function, arrangement: Arrangement, analysis: Analysis) -> None:
        self._function = function
        self._arrangement = arrangement
        self._analysis = analysis
        self.clones: list[int] = []
        """The inputs that a copy stood for, because autograd would not let them be written to."""
        self.backward_writes: list[int] = []

    def joint(self, primals: list[Any], tangents: list[Any]) -> list[Any]:
        """Forward, then backward."""
        signature = self._analysis.signature
        with adapter.FunctionalTensorMode():
            inputs = functional_inputs(primals)
            entering = self._entering(inputs)
            watched = run_watched(self._function, self._arrangement, inputs, entering)
            self._check_same(watched.classified.signature)
            returned = returned_tensors(signature, watched, entering)
            values = [_value(one) for one in returned]
            new = [_value(entering[i]) for i in signature.graph_mutations]
            held = [_value(one) for one in inputs]
            # What follows is backward; the trace says so, nobody has to guess.
            for node in adapter.traced_nodes():
                node.meta["phase"] = FORWARD
            grads = self._grads(inputs, returned, tangents)
            late = [_value(one) for one in inputs]
            self.backward_writes = [
                i for i, (a, b) in enumerate(zip(held, late, strict=True)) if a is not b
            ]
            changed = [late[i] for i in self.backward_writes]
        return [*values, *watched.classified.symbols, *new, *grads, *changed]

    def _entering(self, inputs: Sequence[Any]) -> list[Any]:
        entering: list[Any] = []
        for i, (one, spec) in enumerate(zip(inputs, self._analysis.signature.inputs, strict=True)):
            if spec.requires_grad and (spec.mutation.by_autograd or spec.mutation.is_reshaped):
                self.clones.append(i)
                entering.append(one.clone())
            else:
                entering.append(one)
        return entering

    def _check_same(self, signature: Signature) -> None:
        if signature.outputs != self._analysis.signature.outputs:
            raise InvariantError(
                "the function did not return the same when it was traced as when it was analysed: "
                f"expected {self._analysis.signature.outputs}, got {signature.outputs}. It must "
                "not depend on anything but its arguments."
            )

    def _grads(
        self, inputs: Sequence[Any], returned: Sequence[Any], tangents: Sequence[Tensor]
    ) -> list[Any]:
        signature = self._analysis.signature
        if not signature.trains:
            return []
        outs = [one for one, has in zip(returned, signature.differentiable, strict=True) if has]
        wanted = [i for i, spec in enumerate(signature.inputs) if spec.requires_grad]
        given = functional_inputs(tangents)
        with adapter.no_autocast():
            grads = torch.autograd.grad(
                outs, [inputs[i] for i in wanted], grad_outputs=given, allow_unused=True
            )
        by_input = dict(zip(wanted, grads, strict=True))
        return [_value(by_input.get(i)) for i in range(len(inputs))]


def _value(one: Any) -> Any:
    return adapter.value_of(one) if isinstance(one, Tensor) else one


def capture(
    function: Function,
    arrangement: Arrangement,
    fakes: Sequence[Any],
    analysis: Analysis,
    mode: adapter.FakeTensorMode,
    decompositions: Decompositions | None,
) -> Captured:
    """Trace forward and backward into one graph."""
    trace = _Trace(function, arrangement, analysis)
    signature = analysis.signature
    grad_mode = torch.is_grad_enabled()

    def joint(primals: list[Any], tangents: list[Any]) -> list[Any]:
        return trace.joint(primals, tangents)

    def forward(*args: Any) -> list[Any]:
        return trace.joint(list(args), [])

    try:
        with adapter.below_python(mode), adapter.keep_rng():
            if signature.trains:
                args: tuple[Any, ...] = (list(fakes), analysis.tangents)
                module = adapter.trace(joint, args, decompositions)
            else:
                module = adapter.trace(forward, tuple(fakes), decompositions)
    finally:
        torch.set_grad_enabled(grad_mode)
    return _finish(module, trace, signature)


def _finish(module: GraphModule, trace: _Trace, signature: Signature) -> Captured:
    """Tag nodes, put writes to inputs in their place, drop what only tracing needed."""
    graph = module.graph
    nodes = list(graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    output = nodes[-1]
    num_inputs = len(signature.inputs)
    for node in (*placeholders[num_inputs:], *(n for n in nodes if "phase" not in n.meta)):
        node.meta["phase"] = BACKWARD
    primals = placeholders[:num_inputs]
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    num_forward = signature.num_returned
    written = signature.graph_mutations
    new = results[num_forward : num_forward + len(written)]
    grads = results[num_forward + len(written) : len(results) - len(trace.backward_writes)]
    changed = results[len(results) - len(trace.backward_writes) :]
    returned = results[:num_forward]
    _drop_clones(primals, trace.clones, {*returned, *new})
    boundary = next(
        (n for n in nodes if n.meta["phase"] == BACKWARD and n.op != "placeholder"), output
    )
    for i in signature.returned_mutations:
        # After the graph, but before backward: what backward reads of it has to be kept apart.
        primals[i].meta["written"] = True
    for i, value in zip(written, new, strict=True):
        _write(module, primals[i], value, boundary, FORWARD)
    for i, value in zip(trace.backward_writes, changed, strict=True):
        _write(module, primals[i], value, output, BACKWARD)
    output.args = ([*returned, *grads],)
    _drop_aliases(module)
    _drop_dead(module)
    graph.lint()
    module.recompile()
    return Captured(module, num_forward)


def _drop_clones(primals: Sequence[Node], clones: Sequence[int], returned: set[Any]) -> None:
    """The graph writes nothing, so that an input can be read instead of its copy."""
    for i in clones:
        for user in list(primals[i].users):
            is_clone = user.target is torch.ops.aten.clone.default and not user.kwargs
            if is_clone and user not in returned and user.meta["phase"] == FORWARD:
                user.replace_all_uses_with(primals[i])


def _drop_aliases(module: GraphModule) -> None:
    """A graph that writes nothing has no use for another name of a tensor, unless it returns it."""
    returned = set(module.graph.find_nodes(op="output")[0].all_input_nodes)
    for node in list(module.graph.nodes):
        if node.target in _ALIASES and node not in returned:
            node.replace_all_uses_with(node.args[0])


def _write(module: GraphModule, primal: Node, value: Any, before: Node, phase: str) -> None:
    if value is primal:
        return
    with module.graph.inserting_before(before):
        node = module.graph.call_function(torch.ops.aten.copy_.default, (primal, value))
    node.meta.update(val=primal.meta.get("val"), phase=phase)


def _drop_dead(module: GraphModule) -> None:
    """Remove what nobody reads; what draws random numbers moves the generator, and stays."""
    module.graph.eliminate_dead_code(adapter.is_impure)
