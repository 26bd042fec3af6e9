"""Sizes that change between calls: right numbers, and no more compilations than needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from compile_compare import BACKEND, ENTRIES, Entry, compare, leaf
from shoal.aot import (
    aot_function,
    default_partition,
    min_cut_rematerialization_partition,
    nop,
)

SIZES = (5, 7, 9, 5)


def rows(x: Tensor) -> Tensor:
    return (x * x.shape[0]).sin()


def view_with_size(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y.view(-1), y[: x.shape[0] // 2]


def written(x: Tensor) -> Tensor:
    x[1:].mul_(2)
    return x.sum(0) * x.shape[0]


def size_out(x: Tensor) -> tuple[Tensor, int]:
    return x * 2, x.shape[0] + 1


def made_by_size(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0]).unsqueeze(1) * x


def saved_size(x: Tensor) -> Tensor:
    # mean's derivative divides by a size that the backward must remember.
    return x.mean(0) * x.exp().mean()


PROGRAMS = [rows, view_with_size, written, size_out, made_by_size, saved_size]


@pytest.mark.parametrize("fn", PROGRAMS)
def test_all_dynamic(fn: Callable[..., Any]) -> None:
    def inputs() -> tuple[Tensor]:
        return (torch.randn(5, 6, requires_grad=True) * 1,)

    compare(fn, inputs, dynamic=True)


@pytest.mark.parametrize("fn", PROGRAMS)
@pytest.mark.parametrize("grad", [True, False])
def test_marked_dimension_compiles_once(fn: Callable[..., Any], grad: bool) -> None:
    counter = CompileCounterWithBackend(BACKEND)
    call = torch.compile(fn, backend=counter, fullgraph=True)
    for size in SIZES:
        leaves = [torch.arange(size * 6.0).reshape(size, 6).requires_grad_(grad) for _ in "ab"]
        args = [leaf * 1 for leaf in leaves]
        torch._dynamo.mark_dynamic(args[1], 0)
        want, got = fn(args[0]), call(args[1])
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert torch.equal(args[0], args[1])
        if grad:
            for result in (want, got):
                first = result[0] if isinstance(result, tuple) else result
                first.sum().backward()
            assert leaves[0].grad is not None
            assert leaves[1].grad is not None
            assert torch.equal(leaves[0].grad, leaves[1].grad)
    assert counter.frame_count == 1


def test_second_size_makes_it_dynamic() -> None:
    """Without a mark: static first, dynamic at the second size, then no more."""
    counter = CompileCounterWithBackend(BACKEND)
    call = torch.compile(rows, backend=counter, fullgraph=True)
    for size in (5, 7, 9, 11):
        x = torch.randn(size, 6, requires_grad=True)
        assert torch.equal(call(x), rows(x))
    assert counter.frame_count == 2


def test_integer_argument() -> None:
    def program(x: Tensor, n: int) -> Tensor:
        return x[:n] * n

    counter = CompileCounterWithBackend(BACKEND)
    call = torch.compile(program, backend=counter, fullgraph=True, dynamic=True)
    x = torch.randn(9, 6, requires_grad=True)
    for n in (3, 5, 7):
        got, want = call(x, n), program(x, n)
        assert torch.equal(got, want)
        grads = [torch.autograd.grad(y.sum(), x)[0] for y in (got, want)]
        assert torch.equal(*grads)
    assert counter.frame_count <= 2


def test_size_one_and_zero() -> None:
    """The sizes that symbolic shapes treat apart."""
    call = torch.compile(rows, backend=BACKEND, dynamic=True)
    for size in (4, 1, 0, 3):
        x = torch.randn(size, 6, requires_grad=True)
        y = call(x)
        assert torch.equal(y, rows(x))
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape


def masked(x: Tensor, mask: Tensor) -> Tensor:
    return x[mask] * 2


def masked_inside(x: Tensor, mask: Tensor) -> Tensor:
    return x[x[:, 0] > 0].exp()


@pytest.mark.parametrize("program", [masked, masked_inside])
@pytest.mark.parametrize("through", ENTRIES)
def test_sizes_that_depend_on_data(through: Entry, program: Callable[..., Tensor]) -> None:
    def inputs() -> tuple[Tensor, Tensor]:
        return torch.randn(5, 5, requires_grad=True), torch.tensor([1, 0, 1, 1, 0]).bool()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compare(program, inputs, through=through, scenarios=("train",), steps=2)


@pytest.mark.parametrize("through", ENTRIES)
def test_found_places_that_nothing_reads_in_backward(through: Entry) -> None:
    """Their strides depend on data: what they weigh must not be asked of them."""

    def found(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.nonzero(x > 0), x.sin().sum()

    compare(found, leaf, through=through)


NAMES = ("_dynamo_propagated_dynamic_indices", "_dynamo_weak_dynamic_indices")
"""How Dynamo knows sizes that differ, since torch 2.13 and before."""


def marks(tensor: Tensor) -> set[int]:
    return next((getattr(tensor, name) for name in NAMES if hasattr(tensor, name)), set())


@pytest.mark.parametrize("grad", [True, False])
def test_results_and_what_is_saved_say_which_sizes_differ(grad: bool) -> None:
    """So that what is compiled after it takes these sizes for symbols at once."""

    def program(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.exp()
        return y, y[0], x

    torch._dynamo.reset()
    call = torch.compile(program, backend=BACKEND, fullgraph=True)
    saved: list[set[int]] = []

    def seen(tensor: Tensor) -> Tensor:
        saved.append(marks(tensor))
        return tensor

    expected: tuple[list[set[int]], set[int]]
    for rows, expected in ((4, ([set(), set(), set()], set())), (6, ([{0}, set(), set()], {0}))):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
            results = call(torch.randn(rows, 3, requires_grad=grad))
        assert [marks(one) for one in results] == expected[0]
        assert saved == [expected[1]] * grad


class Scaled(torch.autograd.Function):
    """Its backward asks for the size of a view that it takes itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * x.cos() * x.reshape(-1)[1:].size(0)


@pytest.mark.parametrize("partition", [default_partition, min_cut_rematerialization_partition])
def test_size_of_a_view_taken_in_backward(partition: Any) -> None:
    call = aot_function(Scaled.apply, nop, partition_fn=partition, dynamic=True)
    for size in SIZES:
        x = torch.randn(size, 4, requires_grad=True)
        (got,), (want,) = (torch.autograd.grad(f(x).sum(), x) for f in (call, Scaled.apply))
        assert torch.equal(got, want)


def rows_of_another_view(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y[1:], y.view(-1)[: y.shape[0]]


def size_and_rows(x: Tensor) -> tuple[Tensor, int, Tensor]:
    y = x * 2
    n = y.shape[0]
    rows = y[1:n]
    return rows, n + (n == 4), y[:n]


@pytest.mark.parametrize("program", [rows_of_another_view, size_and_rows])
@pytest.mark.parametrize("grad", [True, False])
def test_size_that_is_fixed_after_a_view_was_taken(
    program: Callable[..., tuple[Any, ...]], grad: bool
) -> None:
    torch._dynamo.reset()
    call = torch.compile(program, backend=BACKEND, dynamic=True)
    for size in (4, 2, 5, 4, 7, 3):
        x = torch.randn(size, 4, requires_grad=grad)
        torch.testing.assert_close(call(x), program(x), rtol=0, atol=0)


def test_number_of_rows_on_either_side() -> None:
    def program(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y[:n], y[n:]

    torch._dynamo.reset()
    call = torch.compile(program, backend=BACKEND)
    x = torch.randn(4, 6, requires_grad=True)
    for n in (2, 3, 1, 4, 0, 2):
        torch.testing.assert_close(call(x, n), program(x, n), rtol=0, atol=0)


def test_size_that_a_decomposition_fixes() -> None:
    """The trace alone meets it."""

    def doubled(x: Tensor, _: int) -> Tensor:
        assert int(x.shape[0]) == 4
        return torch.ops.aten.add.Tensor(x, x)

    def program(x: Tensor) -> tuple[Tensor, Tensor, int]:
        y = x * 2
        return y[: x.shape[0] - 1], y.t(), x.shape[0]

    decompositions = {torch.ops.aten.mul.Tensor: doubled}
    call = aot_function(program, nop, dynamic=True, decompositions=decompositions)
    x = torch.randn(4, 3)
    torch.testing.assert_close(call(x), program(x), rtol=0, atol=0)


def test_size_that_is_fixed_while_it_is_traced() -> None:
    """Into how many parts a tensor falls is a number of the graph."""
    x = torch.randn(10, 10, requires_grad=True)
    parts = aot_function(lambda x: x.split(3), nop, dynamic=True)(x)
    assert all(map(torch.equal, parts, x.split(3)))
