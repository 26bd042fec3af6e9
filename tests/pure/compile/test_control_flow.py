"""Branches, printing and transforms: what is in a graph besides arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._dynamo.exc import BackendCompilerFailed

from compile_compare import BACKEND, compare, compiled, leaf


def branch(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t * 2, (x,)) * 3


def positive() -> tuple[Tensor]:
    return (torch.rand(4, 6).requires_grad_(),)


def negative() -> tuple[Tensor]:
    return ((-torch.rand(4, 6)).requires_grad_(),)


@pytest.mark.parametrize("inputs", [positive, negative])
def test_cond(inputs: Any) -> None:
    compare(branch, inputs, scenarios=("train", "infer"), may_refuse="cond")


def test_cond_without_dynamo() -> None:
    """Branches that return a tensor, not a tuple: torch lets Dynamo read them in the trace."""
    compare(branch, positive, through="aot", scenarios=("train",), may_refuse="cond")


def test_cond_takes_both_branches_of_one_compiled_program() -> None:
    call = compiled(branch, backend=BACKEND, through="compile")
    for inputs in (positive, negative, positive):
        (x,) = inputs()
        with torch.no_grad():
            assert torch.equal(call(x), branch(x))


def test_printing_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    """Effects are kept, once each, in the order of the program."""

    def program(x: Tensor) -> Tensor:
        torch.ops.aten._print("first")
        y = x * 2
        torch.ops.aten._print("second")
        return y

    call = compiled(program, backend=BACKEND, through="compile")
    x = torch.randn(3)
    try:
        got = call(x)
    except BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, NotImplementedError):
            raise
        return
    assert torch.equal(got, x * 2)
    assert capfd.readouterr().out.split() == ["first", "second"]


def test_graph_break_between_two_graphs() -> None:
    """Two graphs with a break between pass tensors, views and gradients on."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        view = y[1:]
        torch._dynamo.graph_break()
        view.add_(1)
        return y.sin(), view

    compare(program, leaf, fullgraph=False)


def test_vmap_inside() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.vmap(lambda row: row.sin() @ row)(x)

    compare(program, leaf)


def test_grad_inside() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.func.grad(lambda t: (t.sin() * t).sum())(x)

    compare(program, lambda: (torch.randn(4, 6),))


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_transform_around_a_graph(transform: Any) -> None:
    """A transform outside a compiled call is served by eager or refused, never ignored."""

    def square(x: Tensor) -> Tensor:
        return (x * x).sum()

    call = compiled(square, backend=BACKEND, through="aot")
    x = torch.randn(4, 6)
    try:
        got = transform(call)(x)
    except RuntimeError:
        return
    assert torch.equal(got, transform(square)(x))


def test_transform_around_torch_compile() -> None:
    def square(x: Tensor) -> Tensor:
        return x.sin() * x

    call = compiled(square, backend=BACKEND, through="compile", fullgraph=False)
    x = torch.randn(4, 6)
    try:
        got = torch.vmap(call)(x)
    except RuntimeError:
        return
    assert torch.equal(got, torch.vmap(square)(x))


def test_compiled_autograd() -> None:
    """A backward captured by compiled autograd gives eager's gradients, or is refused by name."""

    def program(x: Tensor) -> Tensor:
        return (x.sin() * x).exp()

    call = compiled(program, backend=BACKEND, through="compile")
    (x,) = leaf()
    want = torch.autograd.grad(program(x).sum(), x)[0]
    loss = call(x).sum()
    try:
        with compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
    except NotImplementedError as error:
        if "compiled autograd" not in str(error):
            raise
        return
    assert x.grad is not None
    assert torch.equal(x.grad, want)


def test_backwards_of_compiled_autograd_are_not_for_this_backend() -> None:
    (x,) = leaf()
    loss = x.sin().sum()
    capturing = compiled_autograd._enable(torch.compile(backend=BACKEND))
    with capturing, pytest.raises(Exception, match=r"NotImplementedError.*compiled autograd"):
        loss.backward()
    # Nothing of that is left.
    y = x.detach().requires_grad_()
    compiled(torch.sin, backend=BACKEND, through="compile")(y).sum().backward()
    assert y.grad is not None
    assert torch.equal(y.grad, y.detach().cos())


def test_error_of_the_program_is_eager_s() -> None:
    def wrong(x: Tensor) -> Tensor:
        return x @ x

    compare(wrong, leaf, scenarios=("train",))
