"""Inner compilers: each makes a function of a graph."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch.fx import GraphModule

from shoal._torch import compilers as torch_compilers
from shoal.compile.aot.graph_code import Boxed, DirectGraph
from shoal.compile.passes.collectives import collective


class Role(StrEnum):
    """Which part of a function a graph is."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INFERENCE = "inference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A graph to compile."""

    module: GraphModule
    inputs: Sequence[Any]
    """Fake inputs."""
    role: Role
    fixed: tuple[int, ...] = ()
    """Inputs that stay where they are from call to call."""
    handed: tuple[int, ...] = ()
    """Inputs that forward's graph gave, which stay where it leaves them."""
    donated: tuple[int, ...] = ()
    """Inputs that nobody reads afterwards, so that they may be written over."""
    num_visible: int = 0
    """The first outputs, which callers see."""
    number: int = 0
    """Of the function, in the order of compilation."""


Inner = Callable[[Task], Boxed]


def directly(task: Task) -> Boxed:
    """Call the graph's operators one by one."""
    return DirectGraph(task.module, str(task.role))


class Inductor:
    """Give graphs to Inductor; those of one function belong together."""

    def __init__(self, *, cudagraphs: bool) -> None:
        self._cudagraphs = torch_compilers.CudaGraphs() if cudagraphs else None

    def __call__(self, task: Task) -> Boxed:
        """Compile one."""
        return torch_compilers.inductor(
            task.module,
            task.inputs,
            backward=task.role is Role.BACKWARD,
            inference=task.role is Role.INFERENCE,
            fixed=task.fixed,
            handed=task.handed,
            donated=task.donated,
            num_visible=task.num_visible,
            # Collectives were put where they overlap with what computes.
            keeps_order=any(map(collective, task.module.graph.nodes)),
            cudagraphs=self._cudagraphs,
        )


class Given:
    """Compilers that somebody passed, in functorch's manner: a graph and its inputs, a function."""

    def __init__(self, compilers: dict[Role, Callable[[GraphModule, list[Any]], Any]]) -> None:
        self._compilers = compilers

    def __call__(self, task: Task) -> Boxed:
        """Compile one; what comes back takes a list, or its arguments one by one."""
        with compiling(task.number, str(task.role)):
            function = self._compilers[task.role](task.module, list(task.inputs))
        takes_list = getattr(function, "_boxed_call", False)

        def run(given: list[Any]) -> list[Any]:
            return list(function(given) if takes_list else function(*given))

        return run


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
