"""A matrix of gradients reduced in parts is the matrix reduced at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pure.layout.strategies import profile
from shoal.layout import Block, Even, Flat, Layout, ParamSpec, Rows, Whole
from shoal.layout.buffer import shard_of
from shoal.layout.spec import ALIGN_NUMEL
from shoal.runtime import gradient_matrix
from shoal.runtime.gradient_matrix import MatrixParts, limit_parts

LAYOUTS: list[Layout] = [Even(), Flat(), Rows(), Block(4), Whole()]

shape_lists = st.lists(
    st.one_of(st.tuples(st.integers(0, 80)), st.tuples(st.integers(1, 40), st.integers(1, 30))),
    min_size=1,
    max_size=6,
)


@profile(150)
@given(
    shapes=shape_lists,
    layout=st.sampled_from(LAYOUTS),
    num_ranks=st.integers(2, 7),
    columns=st.integers(1, 6).map(lambda n: n * ALIGN_NUMEL),
    missing=st.sets(st.integers(0, 5)),
)
def test_parts_are_the_columns_of_the_matrix(
    shapes: list[tuple[int, ...]],
    layout: Layout,
    num_ranks: int,
    columns: int,
    missing: set[int],
) -> None:
    specs = [
        ParamSpec(name=f"p{i}", shape=shape, dtype=torch.float32) for i, shape in enumerate(shapes)
    ]
    packing = layout.pack(specs, num_ranks)
    num_columns = packing.shard_bytes // 4
    grads = {
        i: torch.randn(shape, dtype=torch.float64).bfloat16()
        for i, shape in enumerate(shapes)
        if i not in missing
    }
    whole = [grads[i].float() if i in grads else torch.zeros(s) for i, s in enumerate(shapes)]
    cut = MatrixParts(packing, num_columns, columns)
    batches = cut.batches(grads, torch.float32, torch.device("cpu"))
    parts = [batch.inputs[0] for batch in batches]
    for batch in batches:
        batch.copy()
    for rank in range(num_ranks):
        output = torch.full((num_columns,), torch.nan)
        for piece, rows in zip(cut.outputs(output), parts, strict=True):
            piece.copy_(rows.view(num_ranks, -1)[rank])
        expected = shard_of(packing, rank, whole).view(torch.float32)
        for index in range(len(specs)):
            piece = packing.piece(index, rank)
            start = piece.offset_bytes // 4
            where = slice(start, start + piece.numel)
            assert torch.equal(output[where], expected[where]), (index, rank)


def test_small_matrices_and_inner_cuts_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ParamSpec(name="w", shape=(64, 48), dtype=torch.float32)
    num_bytes = 64 * 48 * 4
    flat, inner = Flat().pack([spec], 2), Even(dim=1).pack([spec], 2)
    monkeypatch.setattr(gradient_matrix, "LARGE_BYTES", num_bytes + 1)
    assert MatrixParts.of(flat, torch.float32, num_bytes // 2) is None
    monkeypatch.setattr(gradient_matrix, "LARGE_BYTES", num_bytes)
    assert MatrixParts.of(flat, torch.float32, num_bytes) is None
    assert MatrixParts.of(inner, torch.float32, num_bytes // 2) is None
    found = MatrixParts.of(flat, torch.float32, num_bytes // 2)
    assert found is not None
    assert len(found.outputs(torch.zeros(64 * 48 // 2))) == 2


def test_only_a_size_that_no_other_has_goes_in_parts() -> None:
    sizes = [100, 100, 30, 30, 250, 60]
    all_rows = [SimpleNamespace(whole_bytes=size, part_bytes=-1) for size in sizes]
    limit_parts(cast(Any, all_rows))
    assert [rows.part_bytes for rows in all_rows] == [None, None, None, None, 100, 30]
