"""Norms and reductions of sharded tensors are those of the whole ones."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuts import LAYOUTS, SHAPES, parameters, random_tensors, sharded
from pure.layout.strategies import profile
from shoal.comm.local import run_local
from shoal.layout import Flat, Layout, Whole

ORDERS = (2, 1, 0, 3, 0.5, -1, math.inf, -math.inf)


@profile(25)
@given(
    layout=st.sampled_from(LAYOUTS),
    world_size=st.integers(1, 4),
    shapes=st.lists(st.sampled_from([s for s in SHAPES if 0 not in s]), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_norms(
    layout: Layout, world_size: int, shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    whole = random_tensors(shapes, dtype=dtype)

    def rank() -> None:
        ours = sharded(whole, layout)
        for order in ORDERS:
            expected = list(torch._foreach_norm(whole, order))
            torch.testing.assert_close(list(torch._foreach_norm(ours, order)), expected)
            for tensor, value in zip(ours, expected, strict=True):
                torch.testing.assert_close(torch.linalg.vector_norm(tensor, order), value)
                torch.testing.assert_close(tensor.norm(order), value)
        wide = torch.linalg.vector_norm(ours[0], 2, keepdim=True, dtype=torch.float64)
        torch.testing.assert_close(
            wide, torch.linalg.vector_norm(whole[0], 2, keepdim=True, dtype=torch.float64)
        )

    run_local(world_size, rank)


def test_a_norm_whose_square_does_not_fit_its_dtype() -> None:
    whole = torch.full((64,), 100.0, dtype=torch.float16)

    def rank() -> None:
        (tensor,) = sharded([whole], Flat())
        assert torch.linalg.vector_norm(tensor).item() == 800.0

    run_local(2, rank)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("element", [0, 63])
def test_what_is_not_finite_shows_whichever_rank_holds_it(value: float, element: int) -> None:
    whole = torch.ones(64)
    whole[element] = value

    def rank() -> None:
        (tensor,) = sharded([whole], Flat())
        for compute in REDUCTIONS.values():
            torch.testing.assert_close(compute(tensor), compute(whole), equal_nan=True)
        for order in (2, math.inf, -math.inf):
            torch.testing.assert_close(tensor.norm(order), whole.norm(order), equal_nan=True)

    run_local(3, rank)


REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(),
    "sum of some": lambda x: (x > 0).sum(),
    "sum keeping dims": lambda x: x.sum(dim=tuple(range(x.dim())), keepdim=True),
    "sum in float64": lambda x: x.sum(dtype=torch.float64),
    "mean": lambda x: x.mean(),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax(),
    "amin": lambda x: x.amin(),
    "whole max": lambda x: (x.nan_to_num() * 100).clamp(-1e6, 1e6).to(torch.int32).max(),
    "whole min": lambda x: (x.nan_to_num() * 100).clamp(-1e6, 1e6).to(torch.int32).min(),
    "bool min": lambda x: (x > 0).min(),
    "any": lambda x: (x > 2).any(),
    "all": lambda x: (x > -1).all(),
    "close": lambda x: torch.tensor(torch.allclose(x, x + 1e-9)),
    "equal": lambda x: torch.tensor([torch.equal(x, x + 0), torch.equal(x, x + 1)]),
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str, layout: Layout) -> None:
    whole = random_tensors([shape for shape in SHAPES if 0 not in shape])
    compute = REDUCTIONS[name]

    def rank() -> None:
        for tensor, expected in zip(sharded(whole, layout), whole, strict=True):
            torch.testing.assert_close(compute(tensor), compute(expected))

    run_local(1, rank)
    run_local(4, rank)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_have_a_sum_and_no_order(dtype: torch.dtype) -> None:
    whole = [torch.complex(*random_tensors([(5, 3), (5, 3)])).to(dtype)]

    def rank() -> None:
        (tensor,) = sharded(whole, Flat())
        for name in ("sum", "mean", "sum keeping dims", "equal"):
            torch.testing.assert_close(REDUCTIONS[name](tensor), REDUCTIONS[name](whole[0]))
        for order in (1, 2, math.inf):
            expected = torch.linalg.vector_norm(whole[0], order)
            torch.testing.assert_close(torch.linalg.vector_norm(tensor, order), expected)
        for name in ("max", "min", "amax"):
            with pytest.raises(NotImplementedError, match="no order"):
                REDUCTIONS[name](tensor)

    run_local(3, rank)


def test_nothing_has_a_sum_and_no_largest() -> None:
    def rank() -> None:
        (tensor,) = sharded([torch.zeros(0, 4)], Whole())
        assert tensor.sum().item() == 0
        assert tensor.norm().item() == 0
        with pytest.raises(NotImplementedError, match="no element"):
            tensor.max()
        with pytest.raises(RuntimeError):
            tensor.norm(math.inf)

    run_local(2, rank)


def test_autograd_is_not_led_through_a_reduction() -> None:
    def rank() -> None:
        (parameter,) = parameters([torch.ones(8)], Flat())
        for compute in (lambda p: p.sum(), lambda p: p.norm(), lambda p: torch._foreach_norm([p])):
            with pytest.raises(NotImplementedError, match="differentiated"):
                compute(parameter)
            with torch.no_grad():
                compute(parameter)

    run_local(2, rank)
