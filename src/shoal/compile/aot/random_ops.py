"""Operators for graphs of functions that set random states: read a generator's state, set it.

A trace draws nothing, so it cannot know a state's value: it is a tensor of the graph like others.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from shoal import _torch

_NAMESPACE = "shoal"
_READ = "random_state(Generator generator) -> Tensor"
_SET = "set_random_state(Generator generator, Tensor state) -> ()"


def read(generator: torch.Generator) -> Tensor:
    """Trace a generator's state as it is here."""
    define()
    return _torch.run_as_it_is(torch.ops.shoal.random_state.default, (generator,), {})


def write(generator: torch.Generator, state: Tensor) -> None:
    """Trace that a generator is given a state here."""
    define()
    _torch.run_as_it_is(torch.ops.shoal.set_random_state.default, (generator, state), {})


def drop_unread(graph: torch.fx.Graph) -> None:
    """Remove the states that were read in case somebody would go back to them."""
    define()
    for node in graph.find_nodes(
        op="call_function", target=torch.ops.shoal.random_state.default, sort=False
    ):
        if not node.users:
            graph.erase_node(node)


@functools.cache
def define() -> torch.library.Library:
    """Make the operators known to torch, once."""
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    for schema in (_READ, _SET):
        library.define(schema)
    library.impl("random_state", torch.Generator.get_state, "CompositeExplicitAutograd")
    library.impl("set_random_state", _set, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::random_state", _fake_state, lib=library)
    torch.library.register_fake(f"{_NAMESPACE}::set_random_state", _fake_set, lib=library)
    for op in (torch.ops.shoal.random_state, torch.ops.shoal.set_random_state):
        torch.fx.node.has_side_effect(op.default)  # graphs keep it, and its place
    return library


def _set(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _fake_state(generator: torch.Generator) -> Tensor:
    return torch.empty(generator.get_state().shape, dtype=torch.uint8)


def _fake_set(generator: torch.Generator, state: Tensor) -> None:
    del generator, state
