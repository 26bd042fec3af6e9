from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp._fully_shard import _fsdp_common as oracle

from pure.layout.strategies import profile
from shoal.errors import UsageError
from shoal.layout.chunk import chunk_bounds, chunk_size, chunk_with_empty

sizes = st.lists(st.integers(0, 7), min_size=1, max_size=3)


@profile(100)
@given(size=st.integers(0, 40), num_chunks=st.integers(1, 17))
def test_bounds_are_those_of_torch_chunk(size: int, num_chunks: int) -> None:
    chunks = chunk_with_empty(torch.arange(size), num_chunks, 0)
    assert len(chunks) == num_chunks
    for rank, chunk in enumerate(chunks):
        start, stop = chunk_bounds(size, num_chunks, rank)
        assert chunk.tolist() == list(range(start, stop))
        assert stop - start <= chunk_size(size, num_chunks)


@profile(100)
@given(size=sizes, num_chunks=st.integers(1, 9), data=st.data())
def test_chunks_are_torchs(size: list[int], num_chunks: int, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(size) - 1))
    tensor = torch.arange(torch.Size(size).numel()).view(size)
    ours = chunk_with_empty(tensor, num_chunks, dim)
    theirs = oracle._chunk_with_empty(tensor, num_chunks, dim)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "call",
    [
        lambda: chunk_size(4, 0),
        lambda: chunk_bounds(4, 2, 2),
        lambda: chunk_bounds(4, 2, -1),
        lambda: chunk_with_empty(torch.ones(2), 0, 0),
    ],
)
def test_wrong_input_is_refused(call) -> None:
    with pytest.raises(UsageError):
        call()
