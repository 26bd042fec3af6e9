"""All-reduces write over new memory of their own, and over nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from comm_graphs import all_reduce, capture, check_same, count, integers, wait
from shoal.compile.passes.in_place import average_in_place

aten = torch.ops.aten


def in_place(fn, *args: Tensor) -> tuple[int, int]:
    """How many all-reduces, and how many scalings, write over their input after the pass."""
    graph = check_same(capture(fn, *args), args, average_in_place).graph
    return count(graph, "all_reduce_"), count(graph, "div_") + count(graph, "mul_")


def test_a_row_of_gradients_is_averaged_where_it_lies() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return wait(all_reduce(torch.cat([x, y]) / 2))

    assert in_place(fn, integers(3), integers(4)) == (1, 1)


def test_what_others_read_stays() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        row = torch.cat([x, y])
        scaled = row / 2
        sent = scaled * 1
        return row, scaled, wait(all_reduce(sent)), sent, wait(all_reduce(torch.cat([x, x]) * 2))

    assert in_place(fn, integers(3), integers(4)) == (1, 1)


def test_inputs_views_and_narrower_numbers_stay() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        halves = torch.cat([y, y]) / 2  # of integers: as wide as floats
        return wait(all_reduce(x)), wait(all_reduce(x.view(4))), wait(all_reduce(halves))

    assert in_place(fn, integers(2, 2), integers(3, dtype=torch.int64)) == (1, 0)


def test_what_has_gaps_or_another_order_stays() -> None:
    def fn(x: Tensor) -> Tensor:
        return wait(all_reduce(x.t() / 2))

    assert in_place(fn, integers(2, 3)) == (0, 0)
