"""Programs that bring their own derivative or their own op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_compare import Case, Entry, compare, inner, leaf, plain, table, two_leaves


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * 3 * x * x


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return grads[0] * 5


class Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        y = x * scale
        ctx.scale = scale
        index = y.argmax(1)
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(y)
        return y.exp(), index

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return grads[0] * y.exp() * ctx.scale, None


class Overwrite(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return grads[0] * 2


class Flat(torch.autograd.Function):
    """Returns a view of what it takes; writes to such views are refused by autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return grads[0].view(4, 6) * 2


def flat(x: Tensor) -> Tensor:
    return Flat.apply(x)


def flat_intermediate(x: Tensor) -> Tensor:
    return Flat.apply(x * 3)


def cube(x: Tensor) -> Tensor:
    return Cube.apply(x) + x


def straight_through(x: Tensor) -> Tensor:
    return StraightThrough.apply(x * 2) * x


def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return Pair.apply(x, 0.5)


def overwrite(x: Tensor) -> Tensor:
    return Overwrite.apply(x * 1) + 1


def overwrite_argument(x: Tensor) -> Tensor:
    return Overwrite.apply(x) + 1


def cube_without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = Cube.apply(x)
    return y * x


@table(
    *(Case(fn=fn, inputs=leaf) for fn in (cube, straight_through, pair, cube_without_grad)),
    Case(fn=cube, inputs=inner),
    Case(fn=cube, inputs=plain),
    Case(fn=overwrite, inputs=leaf, entries=("aot",)),
    # Dynamo does not see that the argument has another history after it.
    Case(fn=overwrite_argument, inputs=inner, entries=("aot",)),
    *(Case(fn=fn, inputs=leaf) for fn in (flat, flat_intermediate)),
)
def test_autograd_function(case: Case, through: Entry) -> None:
    case.check(through)


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    """Custom ops: a pure one with a derivative, one that writes, one that does both."""
    with torch.library._scoped_library("shoal_test", "FRAGMENT"):

        @torch.library.custom_op("shoal_test::scaled", mutates_args=())
        def scaled(x: Tensor, factor: float) -> Tensor:
            return x * factor

        scaled.register_fake(lambda x, factor: torch.empty_like(x))
        scaled.register_autograd(
            lambda ctx, grad: (grad * ctx.factor, None),
            setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
        )

        @torch.library.custom_op("shoal_test::fill_sum", mutates_args=("out",))
        def fill_sum(out: Tensor, x: Tensor) -> None:
            out.fill_(float(x.sum()))

        fill_sum.register_fake(lambda out, x: None)

        @torch.library.custom_op("shoal_test::count_up", mutates_args=("counter",))
        def count_up(counter: Tensor, x: Tensor) -> Tensor:
            counter.add_(1)
            return x + counter

        count_up.register_fake(lambda counter, x: torch.empty_like(x))
        yield


def custom(x: Tensor) -> Tensor:
    return torch.ops.shoal_test.scaled(x.sin(), 3.0) * x


def custom_write(x: Tensor, out: Tensor) -> Tensor:
    torch.ops.shoal_test.fill_sum(out, x.detach())
    return x * out


def custom_write_view(x: Tensor, out: Tensor) -> Tensor:
    torch.ops.shoal_test.fill_sum(out[1], x.detach())
    return x * out


def custom_write_intermediate(x: Tensor) -> Tensor:
    buffer = torch.zeros(4, 6)
    torch.ops.shoal_test.fill_sum(buffer[1:], x.detach())
    return buffer * x


def custom_count(x: Tensor, counter: Tensor) -> Tensor:
    y = torch.ops.shoal_test.count_up(counter, x.detach())
    return torch.ops.shoal_test.count_up(counter, y) * x


def leaf_and_buffer() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6, requires_grad=True), torch.zeros(4, 6)


@table(
    Case(fn=custom, inputs=leaf),
    Case(fn=custom_write, inputs=leaf_and_buffer, options={"steps": 2}),
    Case(fn=custom_write_view, inputs=leaf_and_buffer),
    Case(fn=custom_write_intermediate, inputs=leaf),
    Case(fn=custom_count, inputs=leaf_and_buffer, options={"steps": 2}),
)
def test_custom_op(case: Case, through: Entry) -> None:
    case.check(through)


def test_backward_of_custom_op_saves_a_size() -> None:
    """A derivative may need numbers as well as tensors."""

    class Flatten(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            ctx.shape = x.shape
            ctx.save_for_backward(y)
            return x.reshape(-1) * y.sum()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
            (y,) = ctx.saved_tensors
            return (grads[0] * y.sum()).reshape(ctx.shape), None

    def program(x: Tensor, y: Tensor) -> Tensor:
        return Flatten.apply(x, y)

    compare(program, two_leaves, dynamic=True)
