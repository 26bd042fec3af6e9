"""New values of inputs are written where they are computed, if nobody can tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from comm_graphs import capture, check_same, ops
from shoal.compile.passes.in_place import update_in_place

aten = torch.ops.aten
X, Y = torch.randn(3, 3), torch.randn(3, 3)


def ops_after(fn: Callable[..., object], *args: Tensor) -> list[str]:
    return ops(check_same(capture(fn, *args), args, update_in_place).graph)


def increment(x: Tensor) -> None:
    x.copy_(x + 1)


def with_alpha(x: Tensor, y: Tensor) -> None:
    x.copy_(torch.add(x, y, alpha=3))


def read_before(x: Tensor) -> Tensor:
    y = x * 3
    x.copy_(x - 1)
    return y


def value_read_by_others(x: Tensor) -> Tensor:
    new = x + 1
    y = new * 3
    x.copy_(new)
    return y


def value_read_later(x: Tensor) -> Tensor:
    new = x + 1
    x.copy_(new)
    return new * 3


def twice_itself(x: Tensor) -> None:
    x.copy_(x * x)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (increment, ["add_"]),
        (with_alpha, ["add_"]),
        (read_before, ["mul", "sub_"]),
        (value_read_by_others, ["add_", "mul"]),
        (value_read_later, ["add_", "mul"]),
        (twice_itself, ["mul_"]),
    ],
)
def test_written_at_once(fn: Callable[..., object], expected: list[str]) -> None:
    args = (X, Y) if fn is with_alpha else (X,)
    assert ops_after(fn, *args) == expected


def returned(x: Tensor) -> Tensor:
    new = x + 1
    x.copy_(new)
    return new


def view_returned(x: Tensor) -> Tensor:
    new = x + 1
    x.copy_(new)
    return new.view(9)


def old_value_read(x: Tensor) -> Tensor:
    new = x + 1
    y = x * 3
    x.copy_(new)
    return y


def old_value_seen(x: Tensor) -> Tensor:
    row = x[0]
    new = x + 1
    y = row * 3
    x.copy_(new)
    return y


def across(x: Tensor) -> None:
    x.copy_(x + x.t())


def of_another(x: Tensor, y: Tensor) -> None:
    x.copy_(y + 1)


def no_update(x: Tensor) -> None:
    x.copy_(x @ x)


def second_argument(x: Tensor, y: Tensor) -> None:
    y.copy_(x - y)


@pytest.mark.parametrize(
    "fn",
    [
        *(returned, view_returned, old_value_read, old_value_seen, across, of_another),
        *(no_update, second_argument),
    ],
)
def test_copied_as_before(fn: Callable[..., object]) -> None:
    args = (X, Y) if fn in (of_another, second_argument) else (X,)
    assert "copy_" in ops_after(fn, *args)


def test_other_numbers_are_copied() -> None:
    def fn(x: Tensor) -> None:
        x.copy_(x + 0.5)

    assert ops_after(fn, torch.arange(4)) == ["add", "copy_"]


def batch_norm(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    y, new_var = half_of_batch_norm(x, mean, var)
    var.copy_(new_var)
    return y


def half_of_batch_norm(x: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    functional = aten._native_batch_norm_legit_functional.default
    y, _, _, new_mean, new_var = functional(x, None, None, mean, var, True, 0.1, 1e-5)
    mean.copy_(new_mean)
    return y, new_var


def test_statistics_of_a_batch_norm() -> None:
    args = (torch.randn(4, 3), torch.zeros(3), torch.ones(3))
    assert set(ops_after(batch_norm, *args)) == {"_native_batch_norm_legit", "getitem"}
    # All of them or none: the operator writes both.
    assert "copy_" in ops_after(half_of_batch_norm, *args)
