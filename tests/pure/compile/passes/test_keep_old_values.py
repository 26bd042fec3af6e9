"""What an input was, given to another input, is not what it becomes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from comm_graphs import capture, check_same, ops
from shoal.compile.passes.inductor_rewrites import keep_old_values


def swap(x: Tensor, y: Tensor) -> None:
    old = x.clone()
    x.copy_(y)
    y.copy_(old)


def swap_by_copy(x: Tensor, y: Tensor) -> None:
    old = torch.empty_like(x)
    old.copy_(x)
    x.copy_(y)
    y.copy_(old)


def keep_before_update(x: Tensor, y: Tensor) -> None:
    old = x.clone()
    x.lerp_(y, 0.5)
    y.copy_(old)


def keep_a_view(x: Tensor, y: Tensor) -> None:
    old = x.view(4, 1).clone().view(2, 2)
    x.mul_(2)
    y.copy_(old.view(4))


def keep_one_for_all(x: Tensor, y: Tensor) -> None:
    old = x[:1].clone()
    x.mul_(2)
    y.copy_(old)


def keep_wider(x: Tensor, y: Tensor) -> None:
    old = x.clone().double()
    x.mul_(2)
    y.copy_(old + 1)


def rotate(x: Tensor, y: Tensor, z: Tensor) -> None:
    old = x.clone()
    x.copy_(y)
    y.copy_(z)
    z.copy_(old)


ARITHMETIC = (keep_before_update, keep_a_view, keep_one_for_all, keep_wider)
MOVES = (swap, swap_by_copy, rotate)


@pytest.mark.parametrize(
    ("fn", "dtype"),
    [
        *((fn, torch.float32) for fn in (*ARITHMETIC, *MOVES)),
        *((fn, dtype) for fn in MOVES for dtype in (torch.int64, torch.bool)),
    ],
)
def test_by_inductor(fn: Any, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    args = [torch.tensor([5.0, 0.0, i, 2.0]).to(dtype) for i in range(3 if fn is rotate else 2)]
    expected = [one.clone() for one in args]
    fn(*expected)
    torch.compile(fn, backend="shoal", options={"inner": "inductor"})(*args)
    for found, wanted in zip(args, expected, strict=True):
        assert torch.equal(found, wanted)


def test_only_where_it_matters() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        y.copy_(y.clone() * 2)
        return x.clone()

    args = (torch.randn(3), torch.randn(3))
    module = check_same(capture(fn, *args), args, keep_old_values)
    assert "where" not in ops(module.graph)
