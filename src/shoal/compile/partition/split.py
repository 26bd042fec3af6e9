"""A joint graph taken apart into a forward graph and a backward graph.

    forward    inputs                                      -> outputs, kept tensors, kept symbols
    backward   kept symbols, kept tensors, tangents        -> gradients

Only what is asked for is copied, so there is no dead code to remove: outputs, kept values, and
whatever the outside can see, each in the phase where it was traced. Random numbers that backward
draws again come from forward's generator state, which is kept too.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shoal._torch import fakes, operators
from shoal._torch import symbols as torch_symbols
from shoal.compile.node_kinds import (
    NodeKind,
    closure,
    flat,
    is_tensor,
    kind,
    nodes_in,
    tensors_of,
    value,
)
from shoal.compile.partition.joint import Joint, Side, phase
from shoal.errors import InvariantError

ONCE = frozenset({NodeKind.INPUT, NodeKind.EFFECT, NodeKind.MUTATION})
"""Nodes of forward that backward cannot run again."""


def split(joint: Joint, kept: Iterable[fx.Node]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Make a forward and a backward graph; forward keeps these values if backward uses them."""
    kept = joint.in_order(set(kept))
    again = needed_by_backward(joint, set(kept))
    used = [node for node in kept if node in again]
    tensors = [node for node in used if is_tensor(node)]
    symbols = _with_bindings(joint, [node for node in used if not is_tensor(node)], tensors)
    forward = _forward_graph(joint, [*tensors, *symbols])
    backward = _backward_graph(joint, [*symbols, *tensors], again)
    replay_random_numbers(forward, backward, len(symbols), len(tensors))
    for graph in (forward, backward):
        graph.lint()
    return fx.GraphModule(joint.root, forward), fx.GraphModule(joint.root, backward)


def needed_by_backward(joint: Joint, kept: set[fx.Node]) -> set[fx.Node]:
    """The nodes that backward reads or computes, down to the values that are kept."""
    roots = nodes_in(joint.backward_outputs)
    roots += [node for node in joint.nodes if _stays(joint, node, "backward")]

    def inputs(node: fx.Node) -> Sequence[fx.Node]:
        if node in kept:
            return ()
        if joint.sides[node] is Side.FORWARD and joint.kinds[node] in ONCE:
            raise InvariantError(
                f"backward needs {node.name} ({node.target}), which is {joint.kinds[node].value} "
                "of forward, and it is not kept: add it, or what is computed of it, to the kept"
            )
        return node.all_input_nodes

    return closure(roots, inputs)


def _forward_graph(joint: Joint, kept: list[fx.Node]) -> fx.Graph:
    returned = [*joint.forward_outputs, *kept]
    roots = nodes_in(returned)
    roots += [node for node in joint.nodes if _stays(joint, node, "forward")]
    wanted = closure(roots, lambda node: node.all_input_nodes)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in (*joint.forward_inputs, *joint.in_order(wanted)):
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    _give(graph.output(()), fx.map_arg(tuple(returned), copies.__getitem__))
    return graph


def _backward_graph(joint: Joint, kept: list[fx.Node], wanted: set[fx.Node]) -> fx.Graph:
    """Nodes of backward in their order; what is computed again right before it is first read.

    Computed where it stood in the joint graph, all of it would be alive before backward starts.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in (*kept, *joint.backward_inputs):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)

    def copy(node: fx.Node) -> None:
        missing = closure([node], lambda one: () if one in copies else one.all_input_nodes)
        for one in joint.in_order(missing - copies.keys()):
            copies[one] = graph.node_copy(one, copies.__getitem__)

    for node in joint.in_order(wanted - copies.keys()):
        if node.op == "call_function" and phase(node) == "backward":
            copy(node)
    for one in nodes_in(joint.backward_outputs):
        copy(one)
    _take_parts_at_once(graph)
    for node in graph.nodes:
        node.meta["autograd_backward"] = True  # as passes that read torch's graphs expect
    _give(graph.output(()), fx.map_arg(joint.backward_outputs, copies.__getitem__))
    return graph


def _take_parts_at_once(graph: fx.Graph) -> None:
    """Move parts of tuples to where these are made: until the last is taken, all of them live."""
    parts = graph.find_nodes(op="call_function", target=operator.getitem)
    for part in reversed(parts):
        whole = part.args[0]
        if isinstance(whole, fx.Node) and whole.op != "placeholder":
            whole.append(part)


def _give(output: fx.Node, returned: Any) -> None:
    """Let a graph return a tuple of nodes and constants, with their values as metadata."""
    output.args = (returned,)
    output.meta["val"] = fx.map_arg(returned, value)  # type: ignore[misc]


def _stays(joint: Joint, node: fx.Node, where: str) -> bool:
    """Whether a node runs in a phase though nobody reads it."""
    if node.op != "call_function" or phase(node) != where:
        return False
    kind = joint.kinds[node]
    # A collective that nobody reads is dropped, on every rank alike. Random numbers that nobody
    # reads are drawn, or all that come later would differ.
    return kind in (NodeKind.EFFECT, NodeKind.MUTATION, NodeKind.RANDOM)


def _with_bindings(joint: Joint, symbols: list[fx.Node], tensors: list[fx.Node]) -> list[fx.Node]:
    """Kept numbers, with those first that name a symbol in the shape of anything backward takes.

    A compiler of the backward graph has to know where each size comes from.
    """
    bindings = [node for node in symbols if torch_symbols.bound_symbol(node) is not None]
    derived = [node for node in symbols if node not in bindings]
    bound = {torch_symbols.bound_symbol(node) for node in bindings}
    known = torch_symbols.symbol_bindings(joint.graph)
    for node in (*derived, *tensors, *joint.backward_inputs):
        for symbol in torch_symbols.symbols_in(value(node)):
            if symbol not in bound and symbol in known:
                bindings.append(known[symbol])
            bound.add(symbol)
    return [*bindings, *derived]


def replay_random_numbers(
    forward: fx.Graph, backward: fx.Graph, num_symbols: int, num_tensors: int
) -> None:
    """Let backward draw again what forward drew, from the states of the generator before that.

    A node with one name in both graphs is computed again. The states join the kept tensors: last
    of forward's outputs but the symbols, and of backward's inputs right after the kept ones.
    """
    first = {node.name: node for node in forward.nodes if _draws(node)}
    again = [node for node in backward.nodes if _draws(node) and node.name in first]
    states = []
    for number, node in enumerate(again):
        state = _draw_and_keep(forward, first[node.name])
        place = num_symbols + num_tensors + number
        with backward.inserting_before(list(backward.nodes)[place]):
            taken = backward.placeholder(f"rng_state_output_{number}")
        taken.meta = {"val": value(state)}
        _draw_from(backward, node, taken)
        states.append(state)
    if states:
        returned = list(flat(forward.output_node().args))
        place = len(returned) - num_symbols
        returned[place:place] = states
        _give(forward.output_node(), tuple(returned))


def _draws(node: fx.Node) -> bool:
    return node.op == "call_function" and kind(node) is NodeKind.RANDOM


def _draw_and_keep(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Draw, and give the generator's state from before."""
    given = _state_value(node)
    arguments: tuple[Any, ...] = (node.target, *node.args)
    with graph.inserting_before(node):
        both = graph.call_function(operators.run_and_save_rng_state, arguments, dict(node.kwargs))
        state = graph.call_function(operator.getitem, (both, 0))
        numbers = graph.call_function(operator.getitem, (both, 1))
    both.meta = {**node.meta, "val": (given, value(node))}
    state.meta = {**node.meta, "val": given}
    numbers.meta = dict(node.meta)
    node.replace_all_uses_with(numbers)
    graph.erase_node(node)
    return state


def _draw_from(graph: fx.Graph, node: fx.Node, state: fx.Node) -> None:
    """Draw from a state, and leave the generator as it was."""
    arguments: tuple[Any, ...] = (state, node.target, *node.args)
    with graph.inserting_before(node):
        numbers = graph.call_function(operators.run_with_rng_state, arguments, dict(node.kwargs))
    numbers.meta = dict(node.meta)
    node.replace_all_uses_with(numbers)
    graph.erase_node(node)


def _state_value(node: fx.Node) -> Tensor:
    """A generator's state of the device on which a node draws, without its elements."""
    drawn = tensors_of([node])[0]
    cuda = drawn.device.type == "cuda"
    state = torch.cuda.get_rng_state(drawn.device) if cuda else torch.get_rng_state()
    if not isinstance(drawn, fakes.FakeTensor):
        return state
    return fakes.fake_like(state, drawn)
