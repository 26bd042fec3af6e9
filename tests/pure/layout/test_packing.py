"""What every packing promises, whatever its layout."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pure.layout.strategies import (
    DTYPES,
    assert_same_bits,
    gathered_from,
    packings,
    profile,
    random_tensors,
    spec,
    transformer_block,
)
from shoal.errors import UsageError
from shoal.layout import Block, Even, Flat, Packing, ParamSpec, Region, Rows, Whole
from shoal.layout.buffer import full_tensors, gathered_rows, shard_of, shard_views


@profile(160)
@given(packing=packings())
def test_shard_then_gather_is_the_identity(packing: Packing) -> None:
    tensors = random_tensors(packing.params)
    shards = [shard_of(packing, rank, tensors) for rank in range(packing.world_size)]
    gathered = gathered_from(packing, shards)
    assert_same_bits(full_tensors(packing, gathered), tensors)
    # The other way round: what the stripes write is what the ranks hold, byte for byte.
    written = torch.zeros_like(gathered)
    for index, tensor in enumerate(tensors):
        rows = gathered_rows(packing, written, index)
        for stripe in packing.stripes(index):
            stripe.of_rows(rows).copy_(stripe.of_full(tensor.view(-1)))
    assert torch.equal(written, gathered)


@profile(120)
@given(packing=packings())
def test_sections_are_the_shard_cut_between_parameters(packing: Packing) -> None:
    """In one section ranks keep the same bytes: what one makes of a shard, the other can read."""
    assert [byte for part in packing.sections for byte in part] == [*range(packing.shard_bytes)]
    for index, param in enumerate(packing.params):
        section = packing.section_of(index)
        assert section in packing.sections
        for rank in range(packing.world_size):
            piece = packing.piece(index, rank)
            if piece.numel:
                end = piece.offset_bytes + piece.numel * param.itemsize
                assert section.start <= piece.offset_bytes < end <= section.stop
    tensors, whole = random_tensors(packing.params), packing.in_one_section()
    assert whole.sections == (range(packing.shard_bytes),)
    shards = [shard_of(packing, rank, tensors) for rank in range(packing.world_size)]
    assert_same_bits(full_tensors(whole, torch.cat(shards)), tensors)


def test_large_parameters_that_are_cut_along_dim_0_are_gathered_in_place() -> None:
    shapes = {"gain": (2048,), "bias": (64,), "w": (2048, 2048), "odd": (2049, 2048)}
    params = [spec(name, *shape) for name, shape in shapes.items()]
    for dims, in_place in (((0, 0, 0, 0), {"w", "odd"}), ((0, 0, 1, 0), {"odd"})):
        packing = Even(dims).pack(params, 8).in_sections()
        found = {param.name for i, param in enumerate(params) if packing.is_zero_copy(i)}
        assert found == in_place
        assert len(packing.sections) == len(in_place) + 1


@profile(120)
@given(packing=packings())
def test_regions_are_disjoint_and_cover(packing: Packing) -> None:
    for index, param in enumerate(packing.params):
        count = torch.zeros(param.shape, dtype=torch.int64)
        for rank in range(packing.world_size):
            for region in packing.piece(index, rank).regions:
                assert region.numel > 0
                count[region.slices] += 1
        assert torch.equal(count, torch.ones_like(count))


@profile(120)
@given(packing=packings())
def test_pieces_are_aligned_in_bounds_and_apart(packing: Packing) -> None:
    for rank in range(packing.world_size):
        spans = []
        for param, piece in zip(packing.params, packing.pieces(rank), strict=True):
            if piece.numel == 0:
                continue
            assert piece.offset_bytes % (16 * param.itemsize) == 0
            spans.append((piece.offset_bytes, piece.offset_bytes + piece.numel * param.itemsize))
        spans.sort()
        assert all(stop <= packing.shard_bytes for _, stop in spans)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


@profile(100)
@given(packing=packings())
def test_a_piece_is_its_regions_one_after_another(packing: Packing) -> None:
    tensors = random_tensors(packing.params)
    for rank in range(packing.world_size):
        views = shard_views(packing, rank, shard_of(packing, rank, tensors))
        for tensor, piece, view in zip(tensors, packing.pieces(rank), views, strict=True):
            parts = [tensor[region.slices].reshape(-1) for region in piece.regions]
            want = torch.cat(parts) if parts else tensor.new_empty(0)
            assert view.shape == piece.shape
            assert_same_bits([view.reshape(-1)], [want])


@profile(100)
@given(packing=packings(), data=st.data())
def test_every_holder_of_a_region_is_found(packing: Packing, data: st.DataObject) -> None:
    for index, param in enumerate(packing.params):
        offsets = tuple(data.draw(st.integers(0, size)) for size in param.shape)
        sizes = tuple(
            data.draw(st.integers(0, s - o)) for s, o in zip(param.shape, offsets, strict=True)
        )
        region = Region(offsets=offsets, sizes=sizes)
        holders = packing.holders(index, region)
        touching = [
            rank
            for rank in range(packing.world_size)
            if any(r.overlap(region) for r in packing.piece(index, rank).regions)
        ]
        assert set(touching) <= set(holders)
        assert set(holders) <= set(range(packing.world_size))
        if touching:
            assert (holders[0], holders[-1]) == (touching[0], touching[-1])
        else:
            assert len(holders) == 0


@profile(100)
@given(packing=packings())
def test_zero_copy_is_claimed_exactly_where_it_is_true(packing: Packing) -> None:
    """A parameter of distinct bytes lies in one run, or it does not."""
    for index, param in enumerate(packing.params):
        if param.numel == 0:
            continue
        touched = []
        for rank in range(packing.world_size):
            piece = packing.piece(index, rank)
            ids = torch.arange(param.numel).view(param.shape)
            held = [i for r in piece.regions for i in ids[r.slices].reshape(-1).tolist()]
            start = rank * packing.shard_bytes + piece.offset_bytes
            touched += [(e, start + k * param.itemsize) for k, e in enumerate(held)]
        places = [place for _, place in sorted(touched)]
        runs_on = all(b - a == param.itemsize for a, b in itertools.pairwise(places))
        assert packing.is_zero_copy(index) == runs_on
        assert packing.gathered_offset(index) == (places[0] if runs_on else None)


@profile(100)
@given(packing=packings(), data=st.data())
def test_other_dtypes_keep_every_region(packing: Packing, data: st.DataObject) -> None:
    dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in packing.params]
    cast = packing.with_dtypes(dtypes)
    assert [param.dtype for param in cast.params] == dtypes
    assert type(cast) is type(packing)
    for index, rank in itertools.product(range(len(dtypes)), range(packing.world_size)):
        old, new = packing.piece(index, rank), cast.piece(index, rank)
        assert (old.regions, old.shape) == (new.regions, new.shape)
    tensors = random_tensors(cast.params)
    shards = [shard_of(cast, rank, tensors) for rank in range(cast.world_size)]
    assert_same_bits(full_tensors(cast, gathered_from(cast, shards)), tensors)


@profile(100)
@given(packing=packings(), data=st.data())
def test_one_dtype_for_all_keeps_every_element_offset(
    packing: Packing, data: st.DataObject
) -> None:
    """So one buffer can be cast as a whole: stored in fp32, gathered in bf16."""
    first, second = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(DTYPES))
    params = [ParamSpec(name=p.name, shape=p.shape, dtype=first) for p in packing.params]
    layout = data.draw(st.sampled_from([Even(), Flat(), Rows(), Block(3), Block(24), Whole()]))
    old = layout.pack(params, packing.world_size)
    new = old.with_dtypes([second] * len(params))
    assert old.shard_bytes * second.itemsize == new.shard_bytes * first.itemsize
    for index, rank in itertools.product(range(len(params)), range(packing.world_size)):
        a, b = old.piece(index, rank).offset_bytes, new.piece(index, rank).offset_bytes
        assert a * second.itemsize == b * first.itemsize
        assert old.is_zero_copy(index) == new.is_zero_copy(index)


@profile(100)
@given(packing=packings())
def test_there_are_few_stripes(packing: Packing) -> None:
    for index in range(len(packing.params)):
        assert len(packing.stripes(index)) <= 3


@pytest.mark.parametrize("layout", [Even(), Flat(), Rows(), Block(4), Whole()])
def test_packing_is_a_value(layout) -> None:
    params = transformer_block()
    packing = layout.pack(params, 8)
    assert packing == layout.pack(params, 8)
    assert hash(packing) == hash(layout.pack(params, 8))
    assert packing != layout.pack(params, 7)
    assert repr(packing) == repr(layout.pack(tuple(params), 8))
    with pytest.raises(AttributeError):
        packing.world_size = 3


@pytest.mark.parametrize("layout", [Even(), Flat(), Rows(), Block(4), Whole()])
def test_no_parameters_and_empty_parameters_pack(layout) -> None:
    assert layout.pack([], 3).gathered_bytes == 0
    packing = layout.pack([spec("a", 0), spec("b", 3, 0), spec("c", 0, 3)], 3)
    assert packing.gathered_bytes == packing.padding_bytes == 0
    assert all(packing.is_zero_copy(index) for index in range(3))
    tensors = full_tensors(packing, torch.empty(0, dtype=torch.uint8))
    assert [tuple(tensor.shape) for tensor in tensors] == [(0,), (3, 0), (0, 3)]


@pytest.mark.parametrize("layout", [Even(), Flat(), Rows(), Block(4), Whole()])
def test_wrong_questions_are_refused(layout) -> None:
    packing = layout.pack([spec("w", 4, 4)], 2)
    for call in (
        lambda: packing.piece(1, 0),
        lambda: packing.piece(-1, 0),
        lambda: packing.piece(0, 2),
        lambda: packing.piece(0, -1),
        lambda: packing.stripes(1),
        lambda: packing.holders(1, Region.whole((4, 4))),
        lambda: packing.holders(0, Region.whole((4, 5))),
        lambda: packing.holders(0, Region.whole((4,))),
        lambda: packing.gathered_offset(1),
        lambda: packing.with_dtypes([]),
        lambda: layout.pack([spec("w", 4)], 0),
        lambda: layout.pack([spec("w", 4), spec("w", 3)], 2),
    ):
        with pytest.raises(UsageError):
            call()


def test_wrong_parameters_are_refused() -> None:
    with pytest.raises(UsageError, match=r"twice: \['w'\]"):
        Flat().pack([spec("w", 4), spec("v", 4), spec("w", 3)], 2)
    with pytest.raises(UsageError):
        spec("w", -1)
    with pytest.raises(UsageError):
        ParamSpec(name="w", shape=(1,), dtype="float32")  # pyright: ignore[reportArgumentType]


def test_a_spec_of_a_tensor_forgets_torch_size() -> None:
    param = ParamSpec.of("w", torch.ones(2, 3))
    assert param == spec("w", 2, 3)
    assert type(param.shape) is tuple
    assert (param.numel, param.row_numel, param.nbytes) == (6, 3, 24)
