"""A compiled backward takes the tangents that eager takes, and refuses what eager refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_compare import BACKEND, ENTRIES, Entry, Given, compare, compiled, leaf, two_leaves
from shoal.aot import aot_function, nop


def outputs_of_three(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    z = x * y
    return z.sin(), z.t() * 2, (x * 3).sum()


def image(x: Tensor) -> Tensor:
    return x * x.sin()


def images() -> tuple[Tensor]:
    return (torch.randn(2, 3, 4, 4, requires_grad=True),)


def images_channels_last() -> tuple[Tensor]:
    x = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    return (x.requires_grad_(),)


def first_only(outputs: Any, given: Given) -> None:
    outputs[0].sum().backward()


def last_only(outputs: Any, given: Given) -> None:
    outputs[-1].backward()


def one_by_one(outputs: Any, given: Given) -> None:
    for output in outputs:
        output.sum().backward(retain_graph=True)


def retained_twice(outputs: Any, given: Given) -> None:
    outputs[0].sum().backward(retain_graph=True)
    outputs[0].sum().backward()


def freed_twice(outputs: Any, given: Given) -> None:
    outputs[0].sum().backward()
    outputs[0].sum().backward()


def grad_of_one(outputs: Any, given: Given) -> None:
    given.args[0].grad = torch.autograd.grad(outputs[0].sum(), given.args[0])[0]


def unused_allowed(outputs: Any, given: Given) -> None:
    grads = torch.autograd.grad(outputs[2], given.args, allow_unused=True)
    given.args[0].grad = grads[0]


def accumulated(outputs: Any, given: Given) -> None:
    outputs[0].sum().backward(retain_graph=True)
    outputs[1].mean().backward()


@pytest.mark.parametrize("through", ENTRIES)
@pytest.mark.parametrize(
    "backward", [first_only, last_only, retained_twice, freed_twice, grad_of_one, accumulated]
)
def test_parts(backward: Callable[..., None], through: Entry) -> None:
    # Where eager leaves no gradient at all, one graph for all outputs may leave zeros.
    compare(
        outputs_of_three,
        two_leaves,
        through=through,
        backward=backward,
        scenarios=("train",),
        ignore=("*.grad.exists",),
    )


@pytest.mark.parametrize("through", ENTRIES)
def test_each_output_in_turn(through: Entry) -> None:
    compare(
        outputs_of_three, two_leaves, through=through, backward=one_by_one, scenarios=("train",)
    )


@pytest.mark.parametrize("through", ENTRIES)
def test_gradients_asked_for_by_name(through: Entry) -> None:
    compare(
        outputs_of_three,
        two_leaves,
        through=through,
        backward=unused_allowed,
        scenarios=("train",),
    )


@pytest.mark.parametrize("through", ENTRIES)
def test_second_output_after_a_freed_graph(through: Entry) -> None:
    """All outputs share one backward, so the second is refused with autograd's own error."""
    call = compiled(outputs_of_three, backend=BACKEND, through=through)
    outputs = call(*two_leaves())
    outputs[0].sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        outputs[1].sum().backward()


def expanded(tensor: Tensor) -> Tensor:
    return torch.ones(()).expand(tensor.shape)


def transposed(tensor: Tensor) -> Tensor:
    return torch.randn(*reversed(tensor.shape)).permute(*reversed(range(tensor.dim())))


def gapped(tensor: Tensor) -> Tensor:
    return torch.randn(*tensor.shape, 2)[..., 0]


def channels_last(tensor: Tensor) -> Tensor:
    return torch.randn(tensor.shape).contiguous(memory_format=torch.channels_last)


def contiguous(tensor: Tensor) -> Tensor:
    return torch.randn(tensor.shape)


def needs_grad(tensor: Tensor) -> Tensor:
    return torch.randn(tensor.shape, requires_grad=True)


@pytest.mark.parametrize("through", ENTRIES)
@pytest.mark.parametrize("inputs", [images, images_channels_last])
@pytest.mark.parametrize(
    "tangent", [expanded, transposed, gapped, channels_last, contiguous, needs_grad]
)
def test_tangents(
    tangent: Callable[[Tensor], Tensor], inputs: Callable[[], Any], through: Entry
) -> None:
    def backward(outputs: Tensor, given: Given) -> None:
        outputs.backward(tangent(outputs))

    # The memory order of the gradient follows that of the tangent in eager, and that of the
    # traced tangent in a graph: values are the contract.
    ignore = ("*.grad.stride",)
    compare(image, inputs, through=through, backward=backward, scenarios=("train",), ignore=ignore)


@pytest.mark.parametrize("through", ENTRIES)
@pytest.mark.parametrize("name", ["dtype", "shape"])
def test_wrong_tangents_are_refused(name: str, through: Entry) -> None:
    def backward(outputs: Tensor, given: Given) -> None:
        outputs.backward(torch.ones(3) if name == "shape" else torch.ones(2, 3, 4, 4).long())

    compare(image, images, through=through, backward=backward, scenarios=("train",))


@pytest.mark.parametrize("through", ENTRIES)
def test_double_backward_is_refused_when_it_is_asked_for(through: Entry) -> None:
    """Building the graph of the first backward is allowed; only going through it is not."""
    call = compiled(image, backend=BACKEND, through=through)
    (x,) = images()
    (grad,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    (want,) = torch.autograd.grad(image(x).sum(), x)
    assert torch.equal(grad, want)
    assert grad.requires_grad
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(grad.sum(), x, allow_unused=True)


@pytest.mark.parametrize("through", ENTRIES)
@pytest.mark.parametrize("by", ["inner", "tangent", "other leaf"])
def test_no_second_derivative_is_taken_for_none(by: str, through: Entry) -> None:
    """Autograd leaves out steps on no way to what it is asked for; nothing would be said."""
    call = compiled(lambda x, w: (x.sin() * w).exp(), backend=BACKEND, through=through)
    w, root, tangent = (torch.randn(4, 6, requires_grad=True) for _ in range(3))
    x = root * 1
    (grad,) = torch.autograd.grad(call(x, w), root, tangent, create_graph=True)
    asked = {"inner": root, "tangent": tangent, "other leaf": w}[by]
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(grad.sum(), asked, allow_unused=True)


@pytest.mark.parametrize("through", ENTRIES)
def test_gradient_penalty_by_eager_means(through: Entry) -> None:
    """A gradient that only eager ops touch later needs no double backward of the graph."""
    call = compiled(image, backend=BACKEND, through=through)
    (x,) = images()
    (grad,) = torch.autograd.grad(call(x).sum(), x)
    assert not grad.requires_grad
    assert torch.equal(grad, torch.autograd.grad(image(x).sum(), x)[0])


@pytest.mark.parametrize("through", ENTRIES)
def test_frozen_input(through: Entry) -> None:
    """Only what requires a gradient gets one."""

    def inputs() -> tuple[Tensor, Tensor]:
        return torch.randn(4, 6), torch.randn(4, 6, requires_grad=True)

    compare(outputs_of_three, inputs, through=through)


def test_gradient_flag_is_a_guard() -> None:
    """The same program with and without gradients asked for."""

    def program(x: Tensor) -> Tensor:
        return x.sin()

    call = compiled(program, backend=BACKEND, through="compile")
    (x,) = leaf()
    assert not call(x.detach()).requires_grad
    call(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().cos())


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
def test_anomaly_mode_names_the_nan() -> None:
    """The check for NaN fires in a compiled backward as well."""

    def program(x: Tensor) -> Tensor:
        return (x * 0).sqrt() * x

    def backward(outputs: Tensor, given: Given) -> None:
        with torch.autograd.detect_anomaly(check_nan=True):
            outputs.sum().backward()

    compare(program, leaf, backward=backward, scenarios=("train",))


class Turning(torch.autograd.Function):
    """Changes the shape of a saved tensor in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        ctx.saved_tensors[0].transpose_(0, 1)
        return grad_outputs[0].clone(), None


class Overwriting(torch.autograd.Function):
    """Writes to the gradient that it gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        grad_outputs[0].mul_(2)
        return grad_outputs[0].clone()


def test_metadata_that_backward_must_not_change() -> None:
    """A square tensor, so that transposed elements would fit where they do not belong."""
    call = compiled(lambda x, y: Turning.apply(x, y), backend=BACKEND, through="aot")
    with pytest.raises(AssertionError, match="mutated in the backward"):
        call(torch.randn(3, 3, requires_grad=True), torch.randn(3, 3))


@pytest.mark.parametrize("options", [{}, {"inner": "inductor"}])
def test_write_to_the_gradient_that_came(options: Any) -> None:
    """Whoever holds it sees what was written, as the caller of backward does."""
    x = torch.randn(3, 3, requires_grad=True)
    given = torch.randn(3, 3)
    kept = given.clone()

    def program(x: Tensor) -> Tensor:
        return Overwriting.apply(x * 3)

    call = torch.compile(program, backend=BACKEND, fullgraph=True, options=options)
    call(x).backward(given)
    assert torch.equal(given, kept * 2)
    assert x.grad is not None
    assert torch.equal(x.grad, kept * 6)


def test_write_in_backward_and_create_graph() -> None:
    """What is written there to an input that requires a gradient could not be differentiated."""

    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            ctx.save_for_backward(y)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            with torch.no_grad():
                ctx.saved_tensors[0].mul_(2)
            return grad * 2, None

    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    call = aot_function(Writes.apply, nop)
    out = call(x, y).sum()
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(out, x, create_graph=True, retain_graph=True)
    assert torch.equal(y, torch.ones(3))
    assert torch.equal(torch.autograd.grad(out, x)[0], torch.full((3,), 2.0))
    assert torch.equal(y, torch.full((3,), 2.0))


def test_operators_with_effects_in_backward() -> None:
    """Of `eigvals` the derivative asks a solver for its errors."""
    x = torch.randn(4, 4, requires_grad=True)

    def program(x: Tensor) -> Tensor:
        return torch.linalg.eigvals(x).abs().sum()

    want, got = program(x), aot_function(program, nop)(x)
    (want_grad,), (got_grad,) = (torch.autograd.grad(one, x) for one in (want, got))
    assert torch.allclose(want_grad, got_grad)


def viewed_sum(a: Tensor, b: Tensor) -> Tensor:
    return ((a.view(-1) + b) * 2).sin()


def transposed_sum(a: Tensor, b: Tensor) -> Tensor:
    return (a.t() + b.view(4, 3)).cos()


def joined(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a.view(-1), b]) * 3


@pytest.mark.parametrize("fn", [viewed_sum, transposed_sum, joined])
@pytest.mark.parametrize("how", ["direct", "inductor", "dynamic", "cached"])
def test_gradients_that_are_kept_do_not_share_memory(fn: Any, how: str) -> None:
    """Autograd adds to them in place: what is added to one would be added to the other too."""
    options = {"inner": "inductor" if how == "inductor" else "direct", "cache": how == "cached"}
    found: list[Tensor] = []
    for is_compiled in (False, True, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        a, b = torch.randn(3, 4, requires_grad=True), torch.randn(12, requires_grad=True)
        call = fn
        if is_compiled:
            call = torch.compile(fn, backend="shoal", options=options, dynamic=how == "dynamic")
        for _ in range(3):
            call(a, b).sum().backward()
        assert a.grad is not None
        assert b.grad is not None
        found.append(torch.cat([a.grad.view(-1), b.grad]))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])
