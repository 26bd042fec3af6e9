"""A graph as Python code that calls operators directly.

As a function, it takes its inputs in a list and empties it, so that nothing outlives its last use.
As lines of another function, it costs no call of its own: what small graphs are worth.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from shoal._torch import operators, traces
from shoal.compile.aot.code_writer import CodeWriter
from shoal.compile.node_kinds import mutated_inputs

Boxed = Callable[[list[Any]], list[Any]]


class DirectGraph:
    """A graph that can be called, or written where it would be called."""

    def __init__(self, module: GraphModule, title: str = "graph") -> None:
        self._module = module
        self._title = title
        self._run: Boxed | None = None

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Run it."""
        if self._run is None:
            self._run = self.function()
        return self._run(inputs)

    def function(self) -> Boxed:
        """The function that it is."""
        code = CodeWriter(self._title)
        code.begin("def run(inputs):")
        names = [f"_{node.name}" for node in self._module.graph.find_nodes(op="placeholder")]
        if names:
            code.line("".join(f"{name}, " for name in names) + "= inputs")
        code.line("inputs.clear()")
        results = self.write(code, names)
        code.line(f"return [{', '.join(results)}]")
        code.end()
        return code.compiled("run")

    def write(
        self, code: CodeWriter, inputs: Sequence[str], *, keeps_inputs: bool = False
    ) -> list[str]:
        """Write its lines for inputs of these names; the texts of its results.

        What they name themselves begins with an underscore. Unless `keeps_inputs`, each is deleted
        after its last use.
        """
        return _Writer(self._module, code, inputs, keeps_inputs).write()


@dataclass(frozen=True, slots=True)
class Results:
    """What a graph has returned, in code after it."""

    texts: Sequence[str] | None
    """One by one; None where they are in a list of the name `results`."""

    def one(self, at: int) -> str:
        """A result."""
        return f"results[{at}]" if self.texts is None else self.texts[at]

    def several(self, first: int, last: int) -> str:
        """Some of them, as arguments of a call."""
        if self.texts is None:
            return f"*results[{first}:{last}]"
        return ", ".join(self.texts[first:last])

    def unpacked(self, first: int, last: int) -> str:
        """Some of them, to be given names to."""
        if self.texts is None:
            return f"results[{first}:{last}]"
        return "".join(f"{one}, " for one in self.texts[first:last])


def write_run(code: CodeWriter, run: Boxed, inputs: Sequence[str]) -> Results:
    """Write the lines that run a graph with inputs that somebody holds meanwhile: expressions."""
    if isinstance(run, DirectGraph):
        names = [one if one.isidentifier() else f"x{at}" for at, one in enumerate(inputs)]
        for name, text in zip(names, inputs, strict=True):
            if name != text:
                code.line(f"{name} = {text}")
        return Results(run.write(code, names, keeps_inputs=True))
    code.line(f"results = {code.name('graph', run)}([{', '.join(inputs)}])")
    return Results(None)


class _Writer:
    def __init__(
        self, module: GraphModule, code: CodeWriter, inputs: Sequence[str], keeps_inputs: bool
    ) -> None:
        self._module = module
        self._code = code
        self._nodes = list(module.graph.nodes)
        self._names = {node: f"_{node.name}" for node in self._nodes}
        self._names.update(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True))
        self._last_use = self._find_last_uses()
        self._keeps_inputs = keeps_inputs

    def _find_last_uses(self) -> dict[Node, list[Node]]:
        """For each node, those that nobody reads after it."""
        last: dict[Node, Node] = {}
        for node in self._nodes:
            last[node] = node
            for read in node.all_input_nodes:
                last[read] = node
        by_user: dict[Node, list[Node]] = {}
        for read, user in last.items():
            by_user.setdefault(user, []).append(read)
        return by_user

    def write(self) -> list[str]:
        for node in self._nodes[:-1]:
            self._write(node)
        return [self._value(one) for one in self._nodes[-1].args[0]]  # type: ignore[union-attr]

    def _write(self, node: Node) -> None:
        code = self._code
        if node.op == "get_attr":
            value = traces.attribute(self._module, str(node.target))
            code.line(f"{self._names[node]} = {code.name('attribute', value)}")
        elif node.op != "placeholder":
            code.line(f"{self._names[node]} = {self._call(node)}")
        dead = [
            self._names[one]
            for one in self._last_use.get(node, ())
            if one.op != "placeholder" or not self._keeps_inputs
        ]
        if dead:
            code.line("del " + ", ".join(dead))

    def _call(self, node: Node) -> str:
        if node.op == "call_module":
            function: Any = self._module.get_submodule(str(node.target))
        elif node.op == "call_method":
            values = [self._value(arg) for arg in node.args]
            return f"{values[0]}.{node.target}({', '.join(values[1:])})"
        else:
            function = node.target
        args = [self._value(arg) for arg in node.args]
        named = [f"{key}={self._value(value)}" for key, value in node.kwargs.items()]
        if function is operator.getitem and len(args) == 2:
            return f"{args[0]}[{args[1]}]"
        if isinstance(function, operators.OpOverload):
            function = bound(function)
        return f"{self._code.name('op', function)}({', '.join([*args, *named])})"

    def _value(self, value: Any) -> str:
        if isinstance(value, Node):
            return self._names[value]
        if isinstance(value, (list, tuple)):
            items = ", ".join(self._value(item) for item in value)
            return f"[{items}]" if isinstance(value, list) else f"({items}{',' if value else ''})"
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(self._value(part) for part in parts)})"
        if isinstance(value, dict):
            pairs = ", ".join(f"{k!r}: {self._value(v)}" for k, v in value.items())
            return "{" + pairs + "}"
        return self._code.literal(value)


_FUNCTIONS = """
    _native_batch_norm_legit.default _softmax.default add.Tensor addmm.default bmm.default
    cat.default clone.default detach.default div.Tensor embedding.default flatten.using_ints
    mean.dim mm.default mul.Tensor native_dropout.default native_layer_norm.default permute.default
    pow.Tensor_Scalar relu.default reshape.default rsqrt.default select.int split_with_sizes.default
    sub.Tensor sum.dim_IntList t.default transpose.int unsqueeze.default
"""
_METHODS = "add_.Tensor copy_.default div_.Tensor expand.default mul_.Tensor view.default"

UNCOUNTED = frozenset({operators.operator_named("aten._native_batch_norm_legit.default")})
"""What writes past the version counters of its arguments."""


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
    """What to call for an operator."""
    return BINDINGS.get(op) or operators.straight(op)


def writes_uncounted(graph: Graph) -> set[int]:
    """The inputs of a graph that are written to past their version counters, and not otherwise."""
    found: set[int] = set()
    for at, node in enumerate(graph.find_nodes(op="placeholder")):
        writers = [user.target for user in node.users if node in mutated_inputs(user)]
        if writers and all(one in UNCOUNTED for one in writers):
            found.add(at)
    return found
