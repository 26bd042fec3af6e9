"""Grad mode, inference mode and autocast are carried out of a compiled call, or restored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from compile_compare import (
    BACKEND,
    ENTRIES,
    Case,
    Entry,
    compare,
    compiled,
    inner,
    leaf,
    plain,
    table,
    two_leaves,
)
from compile_facts import differences, stage_of
from shoal._torch import traces


def no_grad_part(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * 2
    return y + x


def no_grad_all(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 2


def enable_grad_part(x: Tensor) -> Tensor:
    y = x * 2
    with torch.enable_grad():
        z = x * 3
    return y + z


def switch_off(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    torch.set_grad_enabled(False)
    return y, x * 3


def switch_on(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    torch.set_grad_enabled(True)
    return y, x * 3


def off_and_on(x: Tensor) -> tuple[Tensor, Tensor]:
    torch.set_grad_enabled(False)
    y = x * 2
    torch.set_grad_enabled(True)
    return y, x * y


def nested(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad():
        y = x * 2
        with torch.enable_grad():
            z = x.sin()
        w = z * 2
    return y, z, w


@torch.no_grad()
def decorated(x: Tensor) -> Tensor:
    return x * 2


@table(
    *(Case(fn=fn, inputs=inputs) for fn in (no_grad_part, no_grad_all) for inputs in (leaf, inner)),
    Case(fn=nested, inputs=leaf),
    Case(fn=decorated, inputs=leaf),
    Case(fn=switch_off, inputs=leaf),
    Case(fn=switch_off, inputs=plain),
    Case(fn=off_and_on, inputs=leaf),
    Case(fn=switch_on, inputs=leaf),
    Case(fn=enable_grad_part, inputs=leaf),
)
def test_grad_mode(case: Case, through: Entry) -> None:
    case.check(through)


def test_grad_mode_is_a_guard() -> None:
    """One compiled program called under changing grad modes."""

    def program(x: Tensor) -> list[Any]:
        seen: list[Any] = []
        for grad in (True, False, True):
            with torch.set_grad_enabled(grad):
                y = double(x)
                seen += [y, y.requires_grad]
        return seen

    def double(x: Tensor) -> Tensor:
        return x * 2

    compare(program, leaf, fullgraph=False)


def matmul(x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        z = x @ y.t()
    return z.float() * 2


def matmul_out(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ y.t(), (x * y).sum()


def disabled_inside(x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        z = x @ y.t()
        with torch.autocast("cpu", enabled=False):
            w = x @ y.t()
    return z.float() + w


@table(*(Case(fn=fn, inputs=two_leaves) for fn in (matmul, matmul_out, disabled_inside)))
def test_autocast_inside(case: Case, through: Entry) -> None:
    case.check(through)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_around(dtype: torch.dtype) -> None:
    """The call is inside autocast, its backward outside: the graph keeps the call's dtypes."""

    def product(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y.t()) * 2

    call = compiled(product, backend=BACKEND, through="compile")
    x, y = two_leaves()
    with torch.autocast("cpu", dtype):
        want, got = product(x, y), call(x, y)
    assert torch.equal(want, got)
    assert got.dtype == dtype
    want_grads = torch.autograd.grad(want.sum(), (x, y))
    got_grads = torch.autograd.grad(got.sum(), (x, y))
    for want_grad, got_grad in zip(want_grads, got_grads, strict=True):
        assert torch.equal(want_grad, got_grad)
    assert torch.equal(call(x, y), product(x, y))


def test_backward_under_autocast() -> None:
    """A backward called inside autocast does not run in the low dtype."""

    def product(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y.t()).sin()

    def backward(outputs: Tensor, given: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            outputs.sum().backward()

    # Eager's backward obeys autocast, a graph's was traced without it.
    compare(
        product,
        two_leaves,
        backward=backward,
        scenarios=("train",),
        tolerance=5e-2,
    )


@pytest.mark.parametrize("made_inside", [True, False])
def test_inference_mode(made_inside: bool) -> None:
    """Outputs are inference tensors where eager's are."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y[1:]

    call = compiled(program, backend=BACKEND, through="compile")
    stages = []
    for run in (program, call):
        torch.manual_seed(0)
        outside = torch.randn(4, 6)
        with torch.inference_mode():
            x = outside * 2 if made_inside else outside
            stages.append([stage_of("inference", {"arg": x, "out": run(x)}, {})])
    assert not differences(*stages, ignore=(), tolerance=0.0)


def test_inference_mode_then_training() -> None:
    """A program compiled for inference is compiled again for training."""

    def program(x: Tensor) -> Tensor:
        return x.sin() * 2

    call = compiled(program, backend=BACKEND, through="compile")
    (x,) = leaf()
    with torch.inference_mode():
        call(x)
    call(x).sum().backward()
    want = torch.autograd.grad(program(x).sum(), x)[0]
    assert x.grad is not None
    assert torch.equal(x.grad, want)


@pytest.mark.parametrize("enabled", [True, False])
def test_inference_mode_inside(enabled: bool) -> None:
    """The region is traced for what it computes; what it returns may be written to later."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(enabled):
            y = x.detach() * 2
        return x.sin(), y

    compare(program, leaf, scenarios=("train", "infer"), ignore=("*.is_inference",))


def test_a_graph_that_fails_leaves_no_region_open() -> None:
    def fails() -> None:
        raise ArithmeticError

    graph = Graph()
    graph.call_function(torch.amp.autocast_mode._enter_autocast, ("cpu", torch.bfloat16, True))
    graph.call_function(torch.autograd.grad_mode._enter_inference_mode, (True,))
    graph.call_function(fails)
    graph.output(())
    with pytest.raises(ArithmeticError):
        traces.Replay(GraphModule({}, graph)).run()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()


def partly_disabled(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", enabled=False):
        exact = x @ y.t()
    return exact, x @ y.t()


@pytest.mark.parametrize("through", ENTRIES)
def test_autocast_around_a_region_without(through: Entry) -> None:
    """What is not cast in the graph is not cast by the autocast that the call comes in either."""
    call = compiled(partly_disabled, backend=BACKEND, through=through)
    x, y = two_leaves()
    with torch.autocast("cpu", torch.bfloat16):
        want, got = partly_disabled(x, y), call(x, y)
    assert [one.dtype for one in got] == [torch.float32, torch.bfloat16]
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    grads = [torch.autograd.grad(one[0].sum() + one[1].float().sum(), x)[0] for one in (want, got)]
    assert torch.equal(*grads)
    plain = call(x, y)
    assert [one.dtype for one in plain] == [torch.float32, torch.float32]
