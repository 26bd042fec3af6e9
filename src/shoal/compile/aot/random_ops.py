"""Operators for graphs of functions that set random states: read a generator's state, set it.

A trace draws nothing, so it cannot know a state's value: it is a tensor of the graph like others.
Generators are numbered: torch 2.11 takes none as a constant of a graph. Numbers hold for one
process, so the operators have a namespace of their own, which the cache on disk does not store.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from shoal._torch import functionals

_NAMESPACE = "shoal_random"
_READ = "state(int generator) -> Tensor"
_SET = "set_state(int generator, Tensor state) -> ()"

_generators: list[torch.Generator] = []
"""By number. Held for good, since a graph may draw from them at any time."""


def read(generator: torch.Generator) -> Tensor:
    """Trace a generator's state as it is here."""
    define()
    return functionals.run_as_it_is(torch.ops.shoal_random.state.default, (_number(generator),), {})


def write(generator: torch.Generator, state: Tensor) -> None:
    """Trace that a generator is given a state here."""
    define()
    functionals.run_as_it_is(
        torch.ops.shoal_random.set_state.default, (_number(generator), state), {}
    )


def drop_unread(graph: torch.fx.Graph) -> None:
    """Remove the states that were read in case somebody would go back to them."""
    define()
    for node in graph.find_nodes(
        op="call_function", target=torch.ops.shoal_random.state.default, sort=False
    ):
        if not node.users:
            graph.erase_node(node)


@functools.cache
def define() -> torch.library.Library:
    """Make the operators known to torch, once."""
    library = torch.library.Library(_NAMESPACE, "DEF")
    for schema, real, fake in ((_READ, _state, _fake_state), (_SET, _set, _fake_set)):
        library.define(schema)
        name = schema[: schema.index("(")]
        library.impl(name, real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=library)
    for op in (torch.ops.shoal_random.state, torch.ops.shoal_random.set_state):
        has_side_effect(op.default)  # graphs keep it, and its place
    return library


def _number(generator: torch.Generator) -> int:
    for number, one in enumerate(_generators):
        if one is generator:
            return number
    _generators.append(generator)
    return len(_generators) - 1


def _state(generator: int) -> Tensor:
    return _generators[generator].get_state()


def _set(generator: int, state: Tensor) -> None:
    _generators[generator].set_state(state)


def _fake_state(generator: int) -> Tensor:
    return torch.empty(_state(generator).shape, dtype=torch.uint8)


def _fake_set(generator: int, state: Tensor) -> None:
    del generator, state
