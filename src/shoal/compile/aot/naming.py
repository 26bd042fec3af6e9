"""Which graph is being compiled, for compilers that name what they make."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from contextvars import ContextVar

MODEL = "model"
"""The name that graphs of all functions share."""

functions = itertools.count()
"""Numbers of functions, in the order in which they are compiled."""

_graphs = itertools.count()
_current: ContextVar[tuple[tuple[str, ...], int]] = ContextVar("graph", default=((), 0))


@contextlib.contextmanager
def compiling(number: int, part: str) -> Iterator[None]:
    """Let a part of a function, such as its backward, be what is compiled now."""
    token = _current.set(((f"{number}_{part}",), next(_graphs)))
    try:
        yield
    finally:
        _current.reset(token)


def get_aot_compilation_context() -> tuple[list[str], str, int]:
    """The graph that is being compiled: its names, the model's, and how many came before it."""
    names, number = _current.get()
    return list(names), MODEL, number


def get_aot_graph_name() -> str:
    """One name for the graph that is being compiled."""
    names, model, number = get_aot_compilation_context()
    return f"{model}__{'_'.join(names)}_{number}"
