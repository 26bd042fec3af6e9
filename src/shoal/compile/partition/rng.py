"""The same random numbers twice: forward's generator state, kept for backward."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from shoal._torch import fakes, operators
from shoal.compile.partition.joint import output_of
from shoal.compile.partition.ops import Kind, flat, kind, value


def replay_random_numbers(
    forward: fx.Graph, backward: fx.Graph, *, num_symbols: int, num_kept: int
) -> int:
    """Let backward draw again what forward drew; returns how many states are kept for that.

    A node with one name in both graphs is computed again. The states join the kept tensors: last
    of forward's outputs but the symbols, and of backward's inputs right after the kept ones.
    """
    first = {node.name: node for node in forward.nodes if _draws(node)}
    again = [node for node in backward.nodes if _draws(node) and node.name in first]
    states = []
    for number, node in enumerate(again):
        state = _draw_and_keep(forward, first[node.name])
        with backward.inserting_before(list(backward.nodes)[num_kept + number]):
            taken = backward.placeholder(f"rng_state_output_{number}")
        taken.meta = {"val": value(state)}
        _draw_from(backward, node, taken)
        states.append(state)
    if states:
        output = output_of(forward)
        returned = list(flat(output.args))
        place = len(returned) - num_symbols
        returned[place:place] = states
        output.args = (tuple(returned),)
        output.meta["val"] = tuple(
            value(one) if isinstance(one, fx.Node) else one for one in returned
        )
    return len(states)


def _draws(node: fx.Node) -> bool:
    return node.op == "call_function" and kind(node) is Kind.RANDOM


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
    drawn = next(one for one in flat(value(node)) if isinstance(one, Tensor))
    cuda = drawn.device.type == "cuda"
    state = torch.cuda.get_rng_state(drawn.device) if cuda else torch.get_rng_state()
    if not isinstance(drawn, fakes.FakeTensor):
        return state
    return fakes.fake_like(state, drawn)
