"""What the caller gets is not kept for backward where eager would not have kept it, if cheap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compile_compare import BACKEND
from joint_graphs import run_split, split_by_min_cut, trace_joint
from shoal.compile.partition.saved_values import FEW


def kept(program: Callable[..., Any]) -> list[str]:
    """What is kept for backward; both graphs together give what the program does."""
    traced = trace_joint(program, [torch.randn(4, 4, requires_grad=True) for _ in range(2)])
    parts = split_by_min_cut(traced.module, num_fwd_outputs=traced.num_fwd_outputs)
    assert all(map(torch.equal, run_split(traced, parts), traced.run()))
    return [node.name for node in parts.backward.graph.find_nodes(op="placeholder")]


def test_an_output_that_is_cheap_to_make_again_is_not_kept() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        before = x.cos()
        gate = (before @ w).sigmoid()
        state = gate * before
        return state.tanh() * gate, state

    assert "mul" not in kept(program)


def test_nor_is_one_that_is_returned_as_a_view() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        before = x.cos()
        gate = (before @ w).sigmoid()
        state = gate * before
        return state.tanh() * gate, state.view(-1)

    assert "mul" not in kept(program)


def test_what_is_not_returned_is_kept_as_before() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        before = x.cos()
        gate = (before @ w).sigmoid()
        state = gate * before
        return state.tanh() * gate * (state @ w)

    assert "mul" in kept(program)


@pytest.mark.parametrize("read", [lambda state: state.sin(), lambda state: state.t().sin()])
def test_an_output_that_backward_reads_itself_is_kept(read: Callable[[Tensor], Tensor]) -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        before = x.cos()
        gate = (before @ w).sigmoid()
        state = gate * before
        return read(state) * gate, state

    assert "mul" in kept(program)


def test_an_output_that_takes_much_to_make_again_is_kept() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        before = x.cos()
        gate = (before @ w).sigmoid()
        state = gate * before
        for _ in range(FEW):
            state = state + 1
        return state.tanh() * gate, state

    assert f"add_{FEW - 1}" in kept(program)


def test_a_product_that_is_returned_is_kept() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        state = x @ w
        return state.tanh() * w, state

    assert "mm" in kept(program)


def test_the_state_of_a_cell_may_be_written_to() -> None:
    gradients = []
    for backend in ("eager", BACKEND):
        torch.manual_seed(0)
        cell = nn.LSTMCell(4, 5)
        hidden, state = torch.compile(cell, backend=backend)(torch.randn(2, 4))
        state.add_(1)
        hidden.sum().backward()
        gradients.append([one.grad for one in cell.parameters()])
    torch.testing.assert_close(*gradients)
