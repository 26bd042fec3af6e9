"""Writes to places in memory that strides tell, of arguments that are not contiguous."""

from __future__ import annotations

import torch
from torch import Tensor

from compile_compare import Case, Entry, Given, leaf, table


def diagonal_filled(x: Tensor) -> Tensor:
    x.fill_diagonal_(3.0)
    return x * 2


def diagonal_filled_without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.fill_diagonal_(3.0)
    return x * 2


def written_by_strides(x: Tensor) -> Tensor:
    x.as_strided((2,), (2,)).mul_(2)
    return x * 2


def written_from_where_it_begins(x: Tensor) -> Tensor:
    x.as_strided((2,), (1,), x.storage_offset()).mul_(2)
    return x * 2


def turned() -> Given:
    root = torch.randn(4, 3, requires_grad=True)
    return Given(args=((root * 1).t(),), watched={"root": root})


def turned_leaf() -> tuple[Tensor]:
    return (torch.randn(4, 3).t().requires_grad_(),)


def gapped() -> Given:
    root = torch.randn(4, 6, requires_grad=True)
    return Given(args=((root * 1)[:, ::2],), watched={"root": root})


def later_rows() -> Given:
    root = torch.randn(6, 4, requires_grad=True)
    return Given(args=((root * 1)[2:],), watched={"root": root})


@table(
    *(
        Case(fn=fn, inputs=turned)
        for fn in (diagonal_filled, diagonal_filled_without_grad, written_by_strides)
    ),
    *(Case(fn=diagonal_filled_without_grad, inputs=inputs) for inputs in (leaf, turned_leaf)),
    *(Case(fn=written_by_strides, inputs=inputs) for inputs in (gapped, later_rows)),
    # Dynamo does not read the offset.
    Case(fn=written_from_where_it_begins, inputs=later_rows, entries=("aot",)),
    torch_differs={
        "*_without_grad-*": "refuses what is not contiguous",
        "written_by_strides-gapped-*": "reads strided memory as if it were dense",
    },
)
def test_strided_writes(case: Case, through: Entry) -> None:
    case.check(through)
