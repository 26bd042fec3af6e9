"""Compilers of graphs in functorch's manner: a graph and its inputs in, a function out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from shoal._torch import compilers

Compiler = Callable[[GraphModule, list[Any]], Callable[..., Any]]

default_decompositions = compilers.pointwise_decompositions()
"""Operators taken apart into those that a simple compiler knows how to fuse."""


def make_boxed_func(f: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """`f` as a function that takes its arguments in a list."""

    def g(args: list[Any]) -> Any:
        return f(*args)

    g._boxed_call = True  # type: ignore[attr-defined]
    return g


def make_boxed_compiler(compiler: Compiler) -> Compiler:
    """`compiler`, with functions that take their arguments in a list."""

    def compile_boxed(module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return make_boxed_func(compiler(module, inputs))

    return compile_boxed


def nop(module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """The compiler that changes nothing."""
    return module


def print_compile(module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """The compiler that prints the graph, and changes nothing."""
    print(module.code)
    return module


def ts_compile(module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile a graph with TorchScript."""
    return compilers.torchscript(module, inputs)


def debug_compile(module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """The compiler that prints the graph and its inputs' shapes, and changes nothing."""
    print(module.code)
    for one in inputs:
        print(tuple(one.shape) if isinstance(one, Tensor) else one)
    return module
