"""Activations are kept as the views that backward reads, where it would have to take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from joint_graphs import run_split, split_by_min_cut, trace_joint

PRODUCT = (4, 3)
"""What the programs compute first."""
SHOWN = (6, 2)
"""What they multiply by something again: another view of it."""


def kept_shapes(program: Callable[..., Any]) -> set[tuple[int, ...]]:
    """The shapes of what is kept for backward; both graphs together give what the program does."""
    shapes = [(4, 2), (2, 3), (2, 5)]
    traced = trace_joint(program, [torch.randn(*one, requires_grad=True) for one in shapes])
    parts = split_by_min_cut(traced.module, num_fwd_outputs=traced.num_fwd_outputs)
    assert all(map(torch.equal, run_split(traced, parts), traced.run()))
    inputs = parts.backward.graph.find_nodes(op="placeholder")
    return {tuple(node.meta["val"].shape) for node in inputs}


def test_a_view_that_all_of_backward_reads_is_kept_itself() -> None:
    def program(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return (x @ w).view(2, 6).t() @ v

    kept = kept_shapes(program)
    assert SHOWN in kept
    assert PRODUCT not in kept


def test_what_backward_reads_in_two_ways_is_kept_as_it_is() -> None:
    def program(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        product = x @ w
        return (product.view(2, 6).t() @ v).sum() + (product.t() @ product).sum()

    kept = kept_shapes(program)
    assert PRODUCT in kept
    assert SHOWN not in kept


def test_what_is_returned_is_kept_as_it_is() -> None:
    """A write to it by whoever gets it must be noticed."""

    def program(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        product = x @ w
        return product, product.view(2, 6).t() @ v

    kept = kept_shapes(program)
    assert PRODUCT in kept
    assert SHOWN not in kept


def test_a_view_that_fuses_into_its_reader_is_not_kept() -> None:
    def program(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return (x @ w).view(2, 6).t().sin().sum() * v.sum()

    kept = kept_shapes(program)
    assert PRODUCT in kept
    assert SHOWN not in kept
