"""Inner compilers: each makes a function of a graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from shoal._torch import compilers as torch_compilers
from shoal.compile.aot.graph_code import Boxed, DirectGraph
from shoal.compile.passes.collectives import collective

if TYPE_CHECKING:
    from shoal.compile.graph_compilers import Compiler


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
    """Inputs that the forward graph saved, which stay where it leaves them."""
    donated: tuple[int, ...] = ()
    """Inputs that are not read afterwards, so that they may be written over."""
    num_visible: int = 0
    """The number of outputs that callers see, which come first."""
    number: int = 0
    """The number of the function, in the order of compilation."""


Inner = Callable[[Task], Boxed]


def directly(task: Task) -> Boxed:
    """Call the graph's operators one by one."""
    return DirectGraph(task.module, str(task.role))


class Inductor:
    """Gives the graphs of one function to Inductor."""

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
            # Passes have put collectives where they overlap with computation.
            keeps_order=any(map(collective, task.module.graph.nodes)),
            cudagraphs=self._cudagraphs,
        )


class Given:
    """Compilers that the caller passed, as functorch defines them: graph and inputs, a function."""

    def __init__(
        self, forward: Compiler, backward: Compiler | None, inference: Compiler | None
    ) -> None:
        self._compilers = {
            Role.FORWARD: forward,
            Role.BACKWARD: backward or forward,
            Role.INFERENCE: inference or forward,
        }

    def __call__(self, task: Task) -> Boxed:
        """Compile one; the result takes a list, or its arguments one by one."""
        token = _current.set(([f"{task.number}_{task.role}"], next(_graphs)))
        try:
            function = self._compilers[task.role](task.module, list(task.inputs))
        finally:
            _current.reset(token)
        takes_list = getattr(function, "_boxed_call", False)

        def run(given: list[Any]) -> list[Any]:
            return list(function(given) if takes_list else function(*given))

        return run


functions = itertools.count()
"""Numbers of functions, in the order in which they are compiled."""

_graphs = itertools.count()
_current: ContextVar[tuple[list[str], int]] = ContextVar("graph", default=([], 0))
"""The names of the graph that is being compiled, and how many came before it."""


def get_aot_compilation_context() -> tuple[list[str], str, int]:
    """The graph that is being compiled: its names, the model's, and how many came before it."""
    names, number = _current.get()
    return list(names), "model", number


def get_aot_graph_name() -> str:
    """One name for the graph that is being compiled."""
    names, model, number = get_aot_compilation_context()
    return f"{model}__{'_'.join(names)}_{number}"
