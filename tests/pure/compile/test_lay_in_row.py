"""Tensors in one row, by one operator."""

from __future__ import annotations

import pytest
import torch

from shoal.compile.lowering.gathered_rows import lay_in_row

WIDE, NARROW = torch.float32, torch.bfloat16


def parts(dtype: torch.dtype) -> list[torch.Tensor]:
    given = [torch.randn(3, 4), torch.randn(5), torch.randn(0, 2), torch.randn(4, 3).t()]
    return [one.to(dtype) for one in given]


@pytest.mark.parametrize(
    ("given", "wanted"), [(WIDE, WIDE), (NARROW, WIDE), (WIDE, NARROW), (torch.float16, WIDE)]
)
def test_it_is_a_cat_of_casts(given: torch.dtype, wanted: torch.dtype) -> None:
    some = parts(given)
    expected = torch.cat([one.reshape(-1).to(wanted) for one in some])
    assert torch.equal(lay_in_row(some, wanted), expected)


def test_dtypes_may_differ() -> None:
    some = [*parts(NARROW), *parts(torch.float64)]
    expected = torch.cat([one.reshape(-1).to(WIDE) for one in some])
    assert torch.equal(lay_in_row(some, WIDE), expected)


def test_torch_takes_it_for_what_it_does() -> None:
    some = parts(NARROW)
    op = torch.ops.shoal.lay_in_row.default
    checks = ("test_schema", "test_faketensor")
    assert torch.library.opcheck(op, (some, WIDE), test_utils=checks) == dict.fromkeys(
        checks, "SUCCESS"
    )
