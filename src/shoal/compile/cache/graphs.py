"""Captured graphs as JSON: names, operators and arguments; nothing that could be run as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from shoal._torch import symbols, traces, trees
from shoal.compile.cache import operators, values
from shoal.compile.cache.data import is_name
from shoal.compile.cache.errors import DamagedError, NotExactError
from shoal.compile.cache.values import Json


def graph_to_json(module: fx.GraphModule) -> Json:
    """A graph; refused if anything in it could not be read back exactly."""
    return [_node_to_json(node) for node in module.graph.nodes]


def _node_to_json(node: fx.Node) -> Json:
    _check_static(node)
    if node.op == "placeholder":
        return {"input": node.name}
    if node.op == "output":
        returned: Any = node.args[0]
        return {"output": values.encode(list(returned), _reference)}
    if node.op != "call_function":
        raise NotExactError(f"its node {node.name} is a {node.op}")
    kind, name = operators.kind_and_name(node.target)
    return {
        "name": node.name,
        kind: name,
        "args": [values.encode(arg, _reference) for arg in node.args],
        "kwargs": values.encode(dict(node.kwargs), _reference),
        "is_strict": traces.INPUT_VALUES in node.meta,
    }


def _reference(value: Any) -> str | None:
    return value.name if isinstance(value, fx.Node) else None


def _check_static(node: fx.Node) -> None:
    """Refuse sizes that are not known, whose guards a file would lose."""
    for one in trees.tree_leaves(node.meta.get("val")):
        is_symbolic = isinstance(one, symbols.SYMBOLIC)
        if is_symbolic or (isinstance(one, Tensor) and symbols.symbols_in(one)):
            raise NotExactError(f"its node {node.name} has a size that is not known")


def graph_from_json(json: Json) -> fx.GraphModule:
    """The graph that JSON describes."""
    graph = fx.Graph()
    known: dict[str, fx.Node] = {}

    def find(name: str) -> fx.Node:
        if name not in known:
            raise DamagedError(f"there is no node {name!r} yet")
        return known[name]

    if type(json) is not list or not json:
        raise DamagedError("expected the nodes of a graph")
    for number, described in enumerate(json):
        if type(described) is not dict or ("output" in described) != (number == len(json) - 1):
            raise DamagedError(f"node {number} is none")
        node = _node_from_json(graph, described, find)
        known[node.name] = node
    return fx.GraphModule(torch.nn.Module(), graph)


def _node_from_json(graph: fx.Graph, json: dict[str, Json], find: Any) -> fx.Node:
    if list(json) == ["output"]:
        returned = values.decode(json["output"], find)
        if type(returned) is not list:
            raise DamagedError("a graph returns a list")
        return graph.output(tuple(returned))
    is_input = list(json) == ["input"]
    name: Any = json["input"] if is_input else json.get("name")
    node = None
    if is_name(name) and is_input:
        node = graph.create_node("placeholder", name, name=name)
    elif is_name(name):
        node = _call_from_json(graph, json, find)
    # Names become those of variables in generated code: only what a graph would choose itself.
    if node is None or node.name != name or name.startswith("SHOAL_"):
        raise DamagedError(f"{name!r} is no name of a node")
    return node


def _call_from_json(graph: fx.Graph, json: dict[str, Json], find: Any) -> fx.Node:
    kinds = [kind for kind in operators.KINDS if kind in json]
    if len(kinds) != 1 or json.keys() != {"name", kinds[0], "args", "kwargs", "is_strict"}:
        raise DamagedError(f"{json!r} is no node")
    target = values.decode({kinds[0]: json[kinds[0]]})
    args = values.decode(json["args"], find)
    kwargs = values.decode(json["kwargs"], find)
    if type(args) is not list or type(kwargs) is not dict or not all(map(is_name, kwargs)):
        raise DamagedError(f"{json!r} is no node")
    node = graph.create_node("call_function", target, tuple(args), kwargs, name=json["name"])
    if json["is_strict"]:
        node.meta[traces.INPUT_VALUES] = ((), {})  # filled in with the values of all nodes
    return node
