"""Scatters of a number into a constant become comparisons; others stay."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from comm_graphs import capture, check_same
from shoal.compile.passes.inductor_rewrites import compare_instead_of_scatter

aten = torch.ops.aten


def calls_after(fn: Any, *args: Tensor) -> Counter[Any]:
    module = check_same(capture(fn, *args), args, compare_instead_of_scatter)
    return Counter(node.target for node in module.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_one_element_per_row(dim: int, dtype: torch.dtype) -> None:
    shape = [4, 6]
    shape[dim] = 1

    def fn(index: Tensor) -> Tensor:
        return torch.full((4, 6), 2, dtype=dtype).scatter(dim, index, -1) * 3

    calls = calls_after(fn, torch.randint(4, shape))
    assert calls[aten.scatter.value] == 0
    assert calls[aten.where.self] == 1


def test_several_elements_per_row_stay() -> None:
    """A row may name an element twice, and rows may be fewer than there are."""

    def fn(several: Tensor, fewer: Tensor) -> tuple[Tensor, Tensor]:
        blank = torch.full((4, 6), 0.0)
        return blank.scatter(1, several, 1.0) * 2, blank.scatter(1, fewer, 1.0) * 2

    calls = calls_after(fn, torch.randint(6, (4, 2)), torch.randint(6, (3, 1)))
    assert calls[aten.scatter.value] == 2


def test_what_is_no_constant_stays() -> None:
    calls = calls_after(
        lambda x, index: x.scatter(1, index, 1.0), torch.randn(4, 6), torch.randint(6, (4, 1))
    )
    assert calls[aten.scatter.value] == 1
