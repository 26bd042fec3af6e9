"""A graph as Python code that calls operators directly.

As a function, it takes its inputs in a list and empties it, so that each tensor can be freed after
its last use. As lines of another function, it costs no call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from shoal._torch import operators, traces
from shoal.compile.aot.code_writer import CodeWriter, listed
from shoal.compile.node_kinds import mutated_inputs

Boxed = Callable[[list[Any]], list[Any]]


class DirectGraph:
    """A graph that can be called, or written where it would be called."""

    def __init__(self, module: GraphModule, title: str = "graph") -> None:
        self._module = module
        self._title = title

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Run it."""
        return self.function(inputs)

    @cached_property
    def function(self) -> Boxed:
        """The graph as a function."""
        code = CodeWriter(self._title, "run", ["inputs"])
        names = [f"_{node.name}" for node in self._module.graph.find_nodes(op="placeholder")]
        if names:
            code.line(f"{listed(names)}= inputs")
        code.line("inputs.clear()")
        results = self.write(code, names)
        code.line(f"return [{', '.join(results)}]")
        return code.compiled()

    def write(
        self, code: CodeWriter, inputs: Sequence[str], *, keeps_inputs: bool = False
    ) -> list[str]:
        """Write its lines for inputs of these names; the expressions for its results.

        Variables of the lines begin with an underscore. Each is deleted after its last use, and so
        are inputs unless `keeps_inputs`.
        """
        nodes = list(self._module.graph.nodes)
        names = {node: f"_{node.name}" for node in nodes}
        names.update(zip(self._module.graph.find_nodes(op="placeholder"), inputs, strict=True))
        last_reads = _last_reads(nodes)
        for node in nodes[:-1]:
            if node.op == "get_attr":
                value = traces.attribute(self._module, str(node.target))
                code.line(f"{names[node]} = {code.name('attribute', value)}")
            elif node.op != "placeholder":
                code.line(f"{names[node]} = {self._call(node, code, names)}")
            dead = [
                names[one]
                for one in last_reads.get(node, ())
                if one.op != "placeholder" or not keeps_inputs
            ]
            if dead:
                code.line("del " + ", ".join(dead))
        return [_text(one, code, names) for one in nodes[-1].args[0]]

    def _call(self, node: Node, code: CodeWriter, names: Mapping[Node, str]) -> str:
        """The expression that computes a node."""
        function: Any = node.target
        args = [_text(arg, code, names) for arg in node.args]
        if function is operator.getitem and len(args) == 2:
            return f"{args[0]}[{args[1]}]"
        args += [f"{key}={_text(value, code, names)}" for key, value in node.kwargs.items()]
        if node.op == "call_method":
            return f"{args[0]}.{function}({', '.join(args[1:])})"
        if node.op == "call_module":
            function = self._module.get_submodule(function)
        elif isinstance(function, operators.OpOverload):
            function = bound(function)
        return f"{code.name('op', function)}({', '.join(args)})"


def _last_reads(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """For each node, the nodes that it is the last to read."""
    last: dict[Node, Node] = {}
    for node in nodes:
        last.update(dict.fromkeys((node, *node.all_input_nodes), node))
    by_reader: dict[Node, list[Node]] = {}
    for read, reader in last.items():
        by_reader.setdefault(reader, []).append(read)
    return by_reader


def _text(value: Any, code: CodeWriter, names: Mapping[Node, str]) -> str:
    """The expression for an argument of a node."""

    def text(value: Any) -> str:
        if isinstance(value, Node):
            return names[value]
        if isinstance(value, (list, tuple)):
            items = listed(map(text, value))
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        if isinstance(value, slice):
            return f"slice({', '.join(map(text, (value.start, value.stop, value.step)))})"
        if isinstance(value, dict):
            return "{" + listed(f"{key!r}: {text(one)}" for key, one in value.items()) + "}"
        return code.literal(value)

    return text(value)


@dataclass(frozen=True, slots=True)
class GraphResults:
    """The results of a graph, as expressions of the code after it."""

    texts: Sequence[str] | None
    """One by one; None if they are in a list, the variable `results`."""

    def one(self, at: int) -> str:
        """One result."""
        return f"results[{at}]" if self.texts is None else self.texts[at]

    def unpacked(self, first: int, last: int) -> str:
        """Some results, as the right side of an assignment to several names."""
        if self.texts is None:
            return f"results[{first}:{last}]"
        return listed(self.texts[first:last])

    def arguments(self, first: int, last: int) -> str:
        """Some results, as arguments of a call."""
        return ("*" if self.texts is None else "") + self.unpacked(first, last)


def write_run(code: CodeWriter, run: Boxed, inputs: Sequence[str]) -> GraphResults:
    """Write the lines that run a graph with these expressions as inputs, which stay alive."""
    if isinstance(run, DirectGraph):
        names = [one if one.isidentifier() else f"x{at}" for at, one in enumerate(inputs)]
        for name, text in zip(names, inputs, strict=True):
            if name != text:
                code.line(f"{name} = {text}")
        return GraphResults(run.write(code, names, keeps_inputs=True))
    code.line(f"results = {code.name('graph', run)}([{', '.join(inputs)}])")
    return GraphResults(None)


_FUNCTIONS = """
    _native_batch_norm_legit.default _softmax.default add.Tensor addmm.default bmm.default
    cat.default clone.default detach.default div.Tensor embedding.default flatten.using_ints
    mean.dim mm.default mul.Tensor native_dropout.default native_layer_norm.default permute.default
    pow.Tensor_Scalar relu.default reshape.default rsqrt.default select.int split_with_sizes.default
    sub.Tensor sum.dim_IntList t.default transpose.int unsqueeze.default
"""
_METHODS = "add_.Tensor copy_.default div_.Tensor expand.default mul_.Tensor view.default"

UNCOUNTED = frozenset({operators.operator_named("aten._native_batch_norm_legit.default")})
"""Operators that write to arguments without raising their versions."""


def _bindings() -> dict[Any, Callable[..., Any]]:
    listed = [(torch, name) for name in _FUNCTIONS.split()]
    listed += [(torch.Tensor, name) for name in _METHODS.split()]
    return {
        operators.operator_named(f"aten.{name}"): getattr(owner, name.partition(".")[0])
        for owner, name in listed
    }


BINDINGS = _bindings()
"""By operator the Python function that torch generates for it (`torch.mm` for `aten.mm.default`).

Both reach the same kernel. The function parses its arguments in less time than the operator does,
which looks at a schema: 0.4 to 1 µs a call. Listed are overloads of which it is known that the
function chooses them for their arguments.
"""


def bound(op: operators.OpOverload) -> Callable[..., Any]:
    """The fastest function that calls an operator."""
    return BINDINGS.get(op) or operators.straight(op)


def writes_uncounted(graph: Graph) -> set[int]:
    """The inputs of a graph that are written to by operators of `UNCOUNTED` alone."""
    found: set[int] = set()
    for at, node in enumerate(graph.find_nodes(op="placeholder")):
        writers = {user.target for user in node.users if node in mutated_inputs(user)}
        if writers and writers <= UNCOUNTED:
            found.add(at)
    return found
