"""Operators that are two others, called as these: the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from comm_graphs import capture, check_same, ops
from shoal.compile.passes.decompose import decompose_dropout_backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_backward_of_dropout(dtype: torch.dtype) -> None:
    def fn(grad: Tensor, mask: Tensor) -> Tensor:
        return torch.ops.aten.native_dropout_backward(grad, mask, 1 / 0.7) + 1

    args = (torch.randn(64, 33).to(dtype), torch.rand(64, 33) > 0.3)
    module = check_same(capture(fn, *args), args, decompose_dropout_backward)
    assert ops(module.graph) == ["mul", "mul_", "add"]


@pytest.mark.parametrize(("device", "mask_type"), [("meta", torch.bool), ("cpu", torch.float32)])
def test_elsewhere_it_is_one(device: str, mask_type: torch.dtype) -> None:
    def fn(grad: Tensor, mask: Tensor) -> Tensor:
        return torch.ops.aten.native_dropout_backward(grad, mask, 2.0)

    args = (torch.ones(3, device=device), torch.ones(3, dtype=mask_type, device=device))
    module = capture(fn, *args)
    assert decompose_dropout_backward(module.graph) == 0
