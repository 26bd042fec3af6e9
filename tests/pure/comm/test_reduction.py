"""Reductions in rank order, against plain arithmetic."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from shoal.comm.calls import Reduction
from shoal.comm.reduction import reduce_in_order


def reduced(pieces: list[Tensor], op: Reduction) -> Tensor:
    out = torch.empty_like(pieces[0])
    reduce_in_order(pieces, op, out)
    return out


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("op", "oracle"),
    [
        (ReduceOp.SUM, lambda rows: rows.sum(0)),
        (ReduceOp.AVG, lambda rows: rows.mean(0)),
        (ReduceOp.PRODUCT, lambda rows: rows.prod(0)),
        (ReduceOp.MAX, lambda rows: rows.amax(0)),
        (ReduceOp.MIN, lambda rows: rows.amin(0)),
        (dist._make_nccl_premul_sum(0.25), lambda rows: rows.sum(0) / 4),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_floats(num_ranks: int, op: Reduction, oracle, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_ranks)
    rows = torch.randn(num_ranks, 50, generator=generator, dtype=torch.float64).to(dtype)
    expected = oracle(rows.double()).to(dtype)
    tolerance = 0.01 if dtype == torch.bfloat16 else 1e-12
    torch.testing.assert_close(reduced(list(rows), op), expected, rtol=tolerance, atol=tolerance)


def test_a_mean_of_16_bit_floats_does_not_overflow_on_the_way() -> None:
    pieces = [torch.tensor([60000.0], dtype=torch.float16) for _ in range(2)]
    assert reduced(pieces, ReduceOp.AVG).item() == 60000


@pytest.mark.parametrize(
    ("op", "expected"), [(ReduceOp.BAND, 1), (ReduceOp.BOR, 7), (ReduceOp.BXOR, 4 ^ 3)]
)
def test_bits(op: ReduceOp.RedOpType, expected: int) -> None:
    pieces = [torch.tensor([value]) for value in ([5, 3] if op == ReduceOp.BAND else [4, 3])]
    assert reduced(pieces, op).item() == expected


def test_truth_values_add_up_to_truth_values() -> None:
    pieces = [torch.tensor([True, False, False]), torch.tensor([True, True, False])]
    assert reduced(pieces, ReduceOp.SUM).tolist() == [True, True, False]


def test_contributions_are_left_as_they_were() -> None:
    pieces = [torch.ones(3) for _ in range(4)]
    reduced(pieces, ReduceOp.SUM)
    assert all(torch.equal(piece, torch.ones(3)) for piece in pieces)
