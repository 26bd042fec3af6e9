"""Gradients that were packed for a reduction come back whole, if it is not launched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness import ranks
from shoal import fully_shard
from shoal.fsdp import MixedPrecisionPolicy
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole
from shoal.layout import even as even_layout
from shoal.runtime.module_state import units_of


class Many(nn.Module):
    """Parameters of all kinds of sizes: uneven, fewer rows than ranks, none, one dimension."""

    def __init__(self, num_gains: int, dtype: torch.dtype) -> None:
        super().__init__()
        shapes = [(16, 4), (7, 3), (1, 5), (0, 4), (6,), *[(3, 2)] * num_gains]
        self.all = nn.ParameterList(nn.Parameter(torch.randn(s, dtype=dtype)) for s in shapes)

    def forward(self) -> torch.Tensor:
        return torch.stack([(one.abs() ** 2).sum() for one in self.all]).sum()


@pytest.mark.sampled
@ranks(2, 3)
@pytest.mark.parametrize("num_gains", [0, 12], ids=["few", "many"])
@pytest.mark.parametrize("alone", [8, 1 << 20], ids=["sections", "columns"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("layout", [Even(), Flat(), Rows(), Whole(), Block(2)], ids=repr)
def test_what_was_packed_is_unpacked(
    layout: Layout, dtype: torch.dtype, alone: int, num_gains: int
) -> None:
    before, even_layout.ALONE_NUMEL = even_layout.ALONE_NUMEL, alone
    try:
        model = fully_shard(
            Many(num_gains, dtype),
            layout=layout,
            mp_policy=MixedPrecisionPolicy(
                reduce_dtype=torch.float64 if dtype is torch.float32 else None
            ),
        )
        model()
        (unit,) = units_of(model)
        torch.manual_seed(7)
        grads = {
            index: torch.randn(parameter.shape, dtype=dtype)
            for index, parameter in enumerate(unit.full.parameters)
            if index != 1  # a gradient that is missing
        }
        wanted = {index: grad.clone() for index, grad in grads.items()}
        packed = unit.reducer.pack(grads)
        packed.copy()
        assert not packed.grads
        found = unit.reducer.unpack(packed)
        assert found.keys() == wanted.keys()
        for index, grad in found.items():
            assert torch.equal(grad.to(dtype), wanted[index]), index
            for batch in packed.batches:
                for one in batch.inputs:
                    assert grad.untyped_storage()._cdata != one.untyped_storage()._cdata
    finally:
        even_layout.ALONE_NUMEL = before
