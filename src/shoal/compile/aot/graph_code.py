"""A graph as a Python function that calls operators directly.

It takes its inputs in a list and empties it, so that nothing outlives its last use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule, Node

from shoal import _torch
from shoal.compile.aot.bindings import bound
from shoal.compile.aot.source import Source

Boxed = Callable[[list[Any]], list[Any]]


def compile_graph(module: GraphModule, title: str = "graph") -> Boxed:
    """The function that a graph is."""
    writer = _Writer(module, Source(title))
    return writer.write()


class _Writer:
    def __init__(self, module: GraphModule, source: Source) -> None:
        self._module = module
        self._source = source
        self._nodes = list(module.graph.nodes)
        self._last_use = self._find_last_uses()

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

    def write(self) -> Boxed:
        source = self._source
        source.begin("def run(inputs):")
        names = [node.name for node in self._nodes if node.op == "placeholder"]
        if names:
            source.line("".join(f"{name}, " for name in names) + "= inputs")
        source.line("inputs.clear()")
        for node in self._nodes:
            self._write(node)
        source.end()
        return source.compiled("run")

    def _write(self, node: Node) -> None:
        source = self._source
        if node.op == "output":
            source.line(f"return {self._value(list(node.args[0]))}")  # type: ignore[arg-type]
            return
        if node.op == "get_attr":
            value = _torch.attribute(self._module, str(node.target))
            source.line(f"{node.name} = {source.name('attribute', value)}")
        elif node.op != "placeholder":
            source.line(f"{node.name} = {self._call(node)}")
        dead = [one.name for one in self._last_use.get(node, ())]
        if dead:
            source.line("del " + ", ".join(dead))

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
        if function is _torch.getitem and len(args) == 2:
            return f"{args[0]}[{args[1]}]"
        if isinstance(function, _torch.OpOverload):
            function = bound(function)
        return f"{self._source.name('op', function)}({', '.join([*args, *named])})"

    def _value(self, value: Any) -> str:
        if isinstance(value, Node):
            return value.name
        if isinstance(value, (list, tuple)):
            items = ", ".join(self._value(item) for item in value)
            return f"[{items}]" if isinstance(value, list) else f"({items}{',' if value else ''})"
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(self._value(part) for part in parts)})"
        if isinstance(value, dict):
            pairs = ", ".join(f"{k!r}: {self._value(v)}" for k, v in value.items())
            return "{" + pairs + "}"
        return self._source.literal(value)
