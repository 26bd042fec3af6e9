from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp._fully_shard import _fsdp_common as oracle

from pure.layout.strategies import profile
from shoal.errors import UsageError
from shoal.layout.chunk import (
    chunk_bounds,
    chunk_size,
    chunk_with_empty,
    dim0_padded_size,
    dim_chunked_size,
)

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
def test_chunks_and_their_sizes_are_torchs(
    size: list[int], num_chunks: int, data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(size) - 1))
    tensor = torch.arange(torch.Size(size).numel()).view(size)
    ours = chunk_with_empty(tensor, num_chunks, dim)
    theirs = oracle._chunk_with_empty(tensor, num_chunks, dim)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert torch.equal(a, b)
        want = oracle._get_dim_chunked_size(b, tensor.size(), dim)
        assert dim_chunked_size(a, tensor.size(), dim) == want


@profile(50)
@given(size=sizes, factor=st.integers(1, 9))
def test_padded_size_is_torchs(size: list[int], factor: int) -> None:
    want = oracle._get_dim0_padded_size(torch.Size(size), factor)
    assert dim0_padded_size(torch.Size(size), factor) == want


def test_padding_is_exact_where_floats_are_not() -> None:
    assert dim0_padded_size(torch.Size([2**53 + 1]), 1) == torch.Size([2**53 + 1])


def test_an_empty_chunk_keeps_the_dims_that_were_not_cut() -> None:
    empty = chunk_with_empty(torch.ones(2, 3, 4), 3, 1)[2][:, :0]
    assert dim_chunked_size(empty, torch.Size([2, 3, 4]), 1) == torch.Size([2, 0, 4])
    assert dim_chunked_size(empty, torch.Size([2, 3, 4]), -2) == torch.Size([2, 0, 4])
    assert dim_chunked_size(empty, torch.Size([2, 3, 4]), -3) == torch.Size([0, 3, 4])


@pytest.mark.parametrize(
    "call",
    [
        lambda: chunk_size(4, 0),
        lambda: chunk_bounds(4, 2, 2),
        lambda: chunk_bounds(4, 2, -1),
        lambda: chunk_with_empty(torch.ones(2), 0, 0),
        lambda: dim0_padded_size(torch.Size([]), 2),
        lambda: dim0_padded_size(torch.Size([2]), 0),
        lambda: dim_chunked_size(torch.ones(0), torch.Size([2]), 1),
    ],
)
def test_wrong_input_is_refused(call) -> None:
    with pytest.raises(UsageError):
        call()
