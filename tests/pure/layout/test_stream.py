"""What Flat, Rows and Block promise beyond what every packing does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pure.layout.strategies import (
    param_lists,
    profile,
    shapes,
    spec,
    transformer_block,
    worlds,
)
from shoal.errors import UsageError
from shoal.layout import Block, Even, Flat, Layout, Packing, ParamSpec, Rows
from shoal.layout.ragged import ParamRun, RaggedPacking
from shoal.layout.spec import round_up
from shoal.layout.stream import MAX_GROWTH

ragged_layouts = st.one_of(
    st.just(Flat()), st.just(Rows()), st.sampled_from([3, 40, 55, 128, 150]).map(Block)
)


def quantum_of(layout: Layout, param: ParamSpec) -> int:
    if isinstance(layout, Rows):
        return max(param.row_numel, 1)
    return layout.numel if isinstance(layout, Block) else 1


def flat_cuts(packing: Packing, index: int) -> list[tuple[int, int]]:
    """The range of flat elements on each rank that has some, worked out from the regions."""
    param = packing.params[index]
    ids = torch.arange(param.numel).view(param.shape)
    cuts = []
    for rank in range(packing.world_size):
        regions = packing.piece(index, rank).regions
        held = [i for region in regions for i in ids[region.slices].reshape(-1).tolist()]
        if held:
            assert held == list(range(held[0], held[-1] + 1))
            cuts.append((held[0], held[-1] + 1))
    return cuts


@profile(100)
@given(params=param_lists(), layout=ragged_layouts, world_size=worlds)
def test_cuts_are_between_quanta_only(
    params: list[ParamSpec], layout: Layout, world_size: int
) -> None:
    packing = layout.pack(params, world_size)
    for index, param in enumerate(params):
        cuts = flat_cuts(packing, index)
        assert all(start % quantum_of(layout, param) == 0 for start, _ in cuts)
        assert [start for start, _ in cuts[1:]] == [stop for _, stop in cuts[:-1]]


@profile(100)
@given(params=param_lists(), world_size=worlds)
def test_flat_never_needs_a_copy(params: list[ParamSpec], world_size: int) -> None:
    packing = Flat().pack(params, world_size)
    assert all(packing.is_zero_copy(index) for index in range(len(params)))


@profile(100)
@given(params=param_lists(), layout=ragged_layouts, world_size=worlds)
def test_padding_is_bounded(params: list[ParamSpec], layout: Layout, world_size: int) -> None:
    """A rank wastes less than one quantum and one alignment, and MAX_GROWTH to avoid gaps."""
    packing = layout.pack(params, world_size)
    aligned_bytes = sum(param.nbytes + param.align_bytes for param in params)
    quantum_bytes = max(
        (min(quantum_of(layout, p) * p.itemsize, p.nbytes) for p in params), default=0
    )
    step = max((param.align_bytes for param in params), default=1)
    tight = round_up(-(-aligned_bytes // world_size) + quantum_bytes + step, step)
    assert packing.shard_bytes <= tight * (1 + MAX_GROWTH)


@profile(100)
@given(
    kinds=st.lists(st.tuples(shapes, st.integers(1, 60)), min_size=1, max_size=4),
    world_size=worlds,
)
def test_the_smallest_shard_is_found_when_gaps_stay(
    kinds: list[tuple[tuple[int, ...], int]], world_size: int
) -> None:
    """Compare with packing quantum by quantum, in the slowest and plainest way."""
    params = [spec(f"p{index}", *shape) for index, (shape, _) in enumerate(kinds)]
    packing = Rows().pack(params, world_size)
    smallest = 0
    while not _plain_fit(params, world_size, smallest):
        smallest += 16
    elements = packing.shard_bytes // 4
    assert elements >= smallest
    if not all(packing.is_zero_copy(index) for index in range(len(params))):
        assert elements == smallest
    assert elements <= smallest * (1 + MAX_GROWTH)


def _plain_fit(params: list[ParamSpec], world_size: int, capacity: int) -> bool:
    rank = end = 0
    for param in params:
        end = round_up(end, 16)
        for _ in range(param.numel // param.row_numel if param.numel else 0):
            if param.row_numel > capacity:
                return False
            if end + param.row_numel > capacity:
                rank, end = rank + 1, 0
            end += param.row_numel
    return rank < world_size


def test_rows_keep_the_dims_that_are_not_cut() -> None:
    packing = Rows().pack([spec("w", 24, 2, 4), spec("b", 16), spec("s")], 2)
    assert [packing.piece(0, rank).shape for rank in range(2)] == [(14, 2, 4), (10, 2, 4)]
    assert packing.piece(0, 1).regions[0].offsets == (14, 0, 0)
    assert [packing.piece(1, rank).shape for rank in range(2)] == [(0,), (16,)]
    assert [packing.piece(2, rank).shape for rank in range(2)] == [(0,), ()]


def test_flat_and_block_pieces_are_1d() -> None:
    for layout in (Flat(), Block(8)):
        packing = layout.pack([spec("w", 24, 2, 4)], 2)
        assert [packing.piece(0, rank).shape for rank in range(2)] == [(96,), (96,)]


def test_the_last_block_may_be_short() -> None:
    packing = Block(50).pack([spec("w", 120)], 2)
    assert flat_cuts(packing, 0) == [(0, 100), (100, 120)]


def test_the_gap_that_the_docs_draw_is_closed() -> None:
    packing = Rows().pack([spec("a", 16), spec("b", 6, 24)], 2)
    assert packing.shard_bytes == 4 * 96
    assert [packing.piece(1, rank).shape for rank in range(2)] == [(2, 24), (4, 24)]
    assert packing.gathered_offset(1) == 4 * 48


@pytest.mark.parametrize("world_size", [1, 2, 8, 64, 100, 1024])
def test_a_transformer_block_in_rows_needs_no_copy(world_size: int) -> None:
    params = transformer_block()
    packing = Rows().pack(params, world_size)
    assert all(packing.is_zero_copy(index) for index in range(len(params)))
    assert packing.padding_bytes < 0.1 * packing.gathered_bytes


def test_a_transformer_block_on_4096_ranks_is_padded_less_than_evenly() -> None:
    params = transformer_block()
    packing, even = Rows().pack(params, 4096), Even().pack(params, 4096)
    assert sum(packing.is_zero_copy(index) for index in range(len(params))) == 8
    assert packing.gathered_bytes < 0.9 * even.gathered_bytes


def test_blocks_of_128_cost_almost_nothing() -> None:
    packing = Block(128).pack(transformer_block(), 4096)
    assert packing.padding_bytes < packing.gathered_bytes * 0.005


def test_gaps_are_kept_where_closing_them_costs_too_much() -> None:
    params = [spec("a", 9, 101), spec("b", 9, 103)]
    packing = Rows().pack(params, 4)
    assert not all(packing.is_zero_copy(index) for index in range(2))
    assert len(packing.stripes(0)) <= 3


@pytest.mark.parametrize("numel", [0, -1, 1.5, True])
def test_a_block_has_elements(numel) -> None:
    with pytest.raises(UsageError):
        Block(numel)


def test_blocks_of_one_element_are_flat() -> None:
    assert Block(1).pack(transformer_block(), 8) == Flat().pack(transformer_block(), 8)


RUN = ParamRun(rank=0, offset_bytes=0, first=32, later=32)


@pytest.mark.parametrize(
    ("numel", "end"), [(1, (0, 4)), (32, (0, 128)), (33, (1, 4)), (64, (1, 128)), (65, (2, 4))]
)
def test_a_run_ends_after_its_last_element(numel: int, end: tuple[int, int]) -> None:
    assert RUN.end(spec("w", numel)) == end
    assert RUN.rank_of(numel - 1) == end[0]


def test_a_gap_matters_only_between_elements() -> None:
    """Here 16 elements fill the first rank, and 24 of 32 each later one."""
    run = ParamRun(rank=0, offset_bytes=64, first=16, later=24)
    assert run.is_one_run(spec("w", 40), 128)
    assert not run.is_one_run(spec("w", 41), 128)
    assert not run.is_one_run(spec("w", 17), 192)


@pytest.mark.parametrize(
    "change",
    [{"rank": -1}, {"offset_bytes": -1}, {"first": 0}, {"later": 0}, {"align": 0}, {"align": 8}],
)
def test_a_wrong_run_cannot_be_built(change: dict) -> None:
    with pytest.raises(UsageError):
        replace(RUN, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"shard_bytes": 64},  # the first rank's part does not fit
        {"shard_bytes": 130},
        {"world_size": 1},
        {"runs": (RUN, replace(RUN, rank=1))},  # on top of the end of w
        {"runs": (RUN, replace(RUN, rank=1, offset_bytes=68))},
        {"runs": (RUN, replace(RUN, rank=1, offset_bytes=128))},  # beyond the buffer
        {"runs": (replace(RUN, first=30), replace(RUN, rank=1, offset_bytes=64))},  # inside a row
        {"runs": (RUN,)},
    ],
)
def test_a_wrong_packing_cannot_be_built(change: dict) -> None:
    right = {
        "params": (spec("w", 10, 4), spec("b", 10)),
        "world_size": 2,
        "shard_bytes": 128,
        "runs": (RUN, replace(RUN, rank=1, offset_bytes=64)),
        "by_rows": True,
    }
    assert RaggedPacking(**right).gathered_offset(0) == 0
    with pytest.raises(UsageError):
        RaggedPacking(**{**right, **change})
