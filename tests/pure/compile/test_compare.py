"""The comparison itself sees the faults that a compiler can have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_compare import compare, inner, leaf, plain

Graph = Callable[..., tuple[Any, ...]]


def intermediate_and_view(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y[1:]


def write(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


def copies(graph: Graph) -> Graph:
    return lambda *args: tuple(out.clone() for out in graph(*args))


def writes_to_a_copy(graph: Graph) -> Graph:
    return lambda *args: graph(*(arg.clone() for arg in args))


def draws(graph: Graph) -> Graph:
    def call(*args: Any) -> Any:
        torch.rand(1)
        return graph(*args)

    return call


def detaches(graph: Graph) -> Graph:
    return lambda *args: tuple(out.detach() for out in graph(*args))


def reorders(graph: Graph) -> Graph:
    return lambda *args: tuple(out.t().contiguous().t() for out in graph(*args))


def scales_gradients(graph: Graph) -> Graph:
    return lambda *args: tuple(out + (out - out.detach()) for out in graph(*args))


def switches_grad_off(graph: Graph) -> Graph:
    def call(*args: Any) -> Any:
        out = graph(*args)
        torch.set_grad_enabled(False)
        return out

    return call


def forgets_version(graph: Graph) -> Graph:
    def call(*args: Any) -> Any:
        copied = [arg.clone() for arg in args]
        out = graph(*copied)
        for arg, copy in zip(args, copied, strict=True):
            arg.data.copy_(copy)
        return out

    return call


FAULTS = [
    (copies, intermediate_and_view, leaf, "relation"),
    (writes_to_a_copy, write, plain, "arg[0].values"),
    (writes_to_a_copy, write, inner, "arg[0].values"),
    (forgets_version, write, plain, "arg[0].bumped"),
    (draws, write, plain, "rng"),
    (detaches, intermediate_and_view, leaf, "requires_grad"),
    (reorders, write, plain, "out.stride"),
    (scales_gradients, intermediate_and_view, leaf, "arg[0].grad.values"),
    (switches_grad_off, write, plain, "mode grad"),
]


@pytest.mark.parametrize(
    ("fault", "program", "inputs", "named"), FAULTS, ids=[f"{f[0].__name__}" for f in FAULTS]
)
def test_fault_is_named(fault: Any, program: Any, inputs: Any, named: str) -> None:
    def backend(graph: torch.fx.GraphModule, example: list[Any]) -> Graph:
        return fault(graph.forward)

    with pytest.raises(AssertionError) as failure:
        compare(program, inputs, backend, scenarios=("train",))
    assert named in str(failure.value)


def test_no_fault_is_found_in_eager() -> None:
    compare(intermediate_and_view, leaf, "eager")
    compare(write, inner, "eager")
