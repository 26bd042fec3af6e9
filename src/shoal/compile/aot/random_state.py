"""Random states that a traced function sets: noticed at the next draw, and traced there.

A trace runs on tensors without elements, so no draw moves a generator. After each draw the trace
gives the generator a seed that no program uses: a mark, which stands for the state after the draw.
An earlier mark found there means that the function went back to that state (`fork_rng`, a
checkpoint that computes again). Any other seed is a state of the function's own (`manual_seed`).

Two operators read and set a generator's state in the graph, where the state is a tensor like
others. Generators are numbered: torch 2.11 takes none as a constant of a graph. Numbers hold for
one process, so the operators have a namespace of their own, which the cache on disk does not store.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from shoal._torch import dynamo, functionals, operators

_seeds = itertools.count(1 << 48)


class Draws:
    """The draws of one trace. As a context, it leaves the generators as they were."""

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        self._generators = {
            one: _MarkedGenerator(one) for one in (*operators.default_generators(), *generators)
        }

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The generators that were drawn from, and the default generators."""
        return tuple(self._generators)

    def __enter__(self) -> Draws:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._generators.values():
            one.restore()

    def begin(self) -> None:
        """Mark all generators before a function, or its backward, runs."""
        for one in self._generators.values():
            one.mark()

    def end(self) -> None:
        """Trace the states that the function, or its backward, set after its last draw."""
        for one in self._generators.values():
            one.follow()

    def before(self, generator: torch.Generator) -> None:
        """A number is about to be drawn."""
        marked = self._generators.get(generator)
        if marked is not None:
            marked.follow()
        else:
            self._generators[generator] = _MarkedGenerator(generator)

    def after(self, generator: torch.Generator) -> None:
        """A number was drawn."""
        self._generators[generator].mark()


class _MarkedGenerator:
    """A generator, and the states that its marks stand for."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._before = generator.get_state()
        self._states: dict[int, Tensor] = {}
        self._last = generator.initial_seed()

    def restore(self) -> None:
        self._generator.set_state(self._before)

    def mark(self) -> None:
        self._last = next(_seeds)
        self._generator.manual_seed(self._last)
        self._states[self._last] = _trace("state", self._generator)

    def follow(self) -> None:
        """Let the graph set the state that the function has set since the last mark, if any."""
        found = self._generator.initial_seed()
        if found == self._last:
            return
        if dynamo.captures_without_dynamo():
            raise NotImplementedError(
                "a whole step cannot be captured that sets the random state before it draws random "
                "numbers (torch.manual_seed, torch.set_rng_state, torch.random.fork_rng, or "
                "torch.utils.checkpoint around a block that draws). Use "
                "torch.compile(model, backend='shoal'), or set the state outside."
            )
        state = self._states.get(found)
        if state is None:
            state = functionals.constant_in_trace(self._generator.get_state())
        _trace("set_state", self._generator, state)
        self._last = found


_generators: list[torch.Generator] = []
"""By number. Held for good, since a graph may draw from them at any time."""


def _trace(operator: str, generator: torch.Generator, *args: Tensor) -> Any:
    """Trace a call of one of the two operators, at this place of the graph."""
    define()
    op = getattr(torch.ops.shoal_random, operator).default
    return functionals.run_as_it_is(op, (_number(generator), *args), {})


def drop_unread_states(graph: torch.fx.Graph) -> None:
    """Erase nodes that read a generator's state in case the function would go back to it."""
    define()
    for node in graph.find_nodes(
        op="call_function", target=torch.ops.shoal_random.state.default, sort=False
    ):
        if not node.users:
            graph.erase_node(node)


@functools.cache
def define() -> torch.library.Library:
    """Make the operators known to torch, once."""
    library = torch.library.Library("shoal_random", "DEF")
    definitions = {
        "state(int generator) -> Tensor": (_state, _fake_state),
        "set_state(int generator, Tensor state) -> ()": (_set, _fake_set),
    }
    for schema, (real, fake) in definitions.items():
        name = library.define(schema)
        library.impl(name, real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"shoal_random::{name}", fake, lib=library)
        # Graphs keep such nodes, and their order.
        has_side_effect(getattr(torch.ops.shoal_random, name).default)
    return library


def _number(generator: torch.Generator) -> int:
    if generator not in _generators:
        _generators.append(generator)
    return _generators.index(generator)


def _state(generator: int) -> Tensor:
    return _generators[generator].get_state()


def _set(generator: int, state: Tensor) -> None:
    _generators[generator].set_state(state)


def _fake_state(generator: int) -> Tensor:
    return torch.empty(_state(generator).shape, dtype=torch.uint8)


def _fake_set(generator: int, state: Tensor) -> None:
    del generator, state
