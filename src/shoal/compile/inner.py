"""What makes a boxed function of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from shoal import _torch_compile as adapter
from shoal.compile.aot.graph_code import Boxed, compile_graph
from shoal.compile.options import InnerName


def directly(module: GraphModule, inputs: Sequence[Any]) -> Boxed:
    """Call the graph's operators one by one."""
    return compile_graph(module)


def with_inductor(*, backward: bool, inference: bool) -> Callable[..., Boxed]:
    """Give the graph to Inductor."""

    def compile_with_inductor(module: GraphModule, inputs: Sequence[Any]) -> Boxed:
        return adapter.inductor(module, inputs, backward=backward, inference=inference)

    return compile_with_inductor


def boxed(compiler: Callable[[GraphModule, list[Any]], Any]) -> Callable[..., Boxed]:
    """A compiler whose functions take their arguments one by one, as one whose functions do not."""

    def compile_boxed(module: GraphModule, inputs: Sequence[Any]) -> Boxed:
        function = compiler(module, list(inputs))
        takes_list = getattr(function, "_boxed_call", False)

        def run(given: list[Any]) -> list[Any]:
            return list(function(given) if takes_list else function(*given))

        return run

    return compile_boxed


def inner_named(
    name: InnerName, *, backward: bool = False, inference: bool = False
) -> Callable[..., Boxed]:
    """The inner compiler of that name."""
    if name == "direct":
        return directly
    return with_inductor(backward=backward, inference=inference)
