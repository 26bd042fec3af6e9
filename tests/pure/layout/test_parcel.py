from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pure.layout.strategies import Held, packing_pairs, profile, spec
from shoal.errors import UsageError
from shoal.layout import (
    Block,
    Even,
    Flat,
    Holding,
    Packing,
    Parcel,
    Region,
    Rows,
    Whole,
    incoming,
    outgoing,
)
from shoal.layout.parcel import Cut, cut
from shoal.layout.piece import Piece
from shoal.layout.region import flat_regions


def held_pairs(pair: tuple[Packing, Packing]) -> list[tuple[Held, Held]]:
    src, dst = pair
    return [(Held(src, index), Held(dst, index)) for index in range(len(src.params))]


def world_of(pair: tuple[Packing, Packing]) -> range:
    return range(max(packing.world_size for packing in pair))


@profile(160)
@given(pair=packing_pairs())
def test_both_ends_list_the_same_messages(pair: tuple[Packing, Packing]) -> None:
    for src, dst in held_pairs(pair):
        sent = {(a, b): m for a in world_of(pair) for b, m in outgoing(src, dst, a).items()}
        received = {(a, b): m for b in world_of(pair) for a, m in incoming(src, dst, b).items()}
        assert sent == received
        assert all(sent.values()), "no message is empty"


@profile(120)
@given(pair=packing_pairs())
def test_every_element_travels_once_and_between_its_holders(pair: tuple[Packing, Packing]) -> None:
    for (src, dst), param in zip(held_pairs(pair), pair[0].params, strict=True):
        count = torch.zeros(param.shape, dtype=torch.int64)
        for rank in world_of(pair):
            for peer, message in outgoing(src, dst, rank).items():
                for parcel in message:
                    assert src.regions_of(rank)[parcel.src].contains(parcel.region)
                    assert dst.regions_of(peer)[parcel.dst].contains(parcel.region)
                    count[parcel.region.slices] += 1
        assert torch.equal(count, torch.ones_like(count))


def test_no_change_is_a_message_to_oneself() -> None:
    params = [spec("w", 30, 4), spec("b", 40)]
    for layout in (Even(), Flat(), Rows(), Block(16), Whole()):
        packing = layout.pack(params, 3)
        for held in (Held(packing, 0), Held(packing, 1)):
            for rank in range(3):
                regions = held.regions_of(rank)
                parcels = tuple(Parcel(region=r, src=i, dst=i) for i, r in enumerate(regions))
                assert outgoing(held, held, rank) == ({rank: parcels} if parcels else {})


def test_a_rank_asks_only_those_that_hold_its_rows() -> None:
    """Going from 4096 to 2048 ranks, a rank receives from two."""
    params = [spec("w", 1 << 16, 64)]
    src, dst = Held(Even().pack(params, 4096), 0), Held(Even().pack(params, 2048), 0)
    assert list(incoming(src, dst, 100)) == [200, 201]


def message_of(holding: Holding, rank: int) -> tuple[Parcel, ...]:
    return outgoing(holding, holding, rank)[rank]


@profile(60)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 7)), max_size=4), n=st.integers(1, 9)
)
def test_cuts_are_equal_and_make_up_the_message(sizes: list[tuple[int, int]], n: int) -> None:
    message = tuple(
        Parcel(region=Region(offsets=(9 * index, 0), sizes=size), src=index, dst=0)
        for index, size in enumerate(sizes)
    )
    parts = [cut(message, index, n) for index in range(n)]
    numels = [sum(each.stop - each.start for each in part) for part in parts]
    assert max(numels) - min(numels) <= 1
    elements = [
        (each.parcel.src, element)
        for part in parts
        for each in part
        for element in range(each.start, each.stop)
    ]
    whole = [(p.src, element) for p in message for element in range(p.region.numel)]
    assert elements == whole


def test_a_flat_piece_is_cut_at_any_element() -> None:
    held = Held(Flat().pack([spec("w", 10, 7)], 1), 0)
    (first,), (second,) = (cut(message_of(held, 0), index, 2) for index in range(2))
    assert (first.start, first.stop, second.start, second.stop) == (0, 35, 35, 70)
    assert flat_regions((10, 7), 0, 35) == (Region(offsets=(0, 0), sizes=(5, 7)),)


def test_wrong_values_cannot_be_built() -> None:
    parcel = Parcel(region=Region.whole((3,)), src=0, dst=0)
    for call in (
        lambda: Piece(offset_bytes=-1, shape=(2,), regions=(Region.whole((2,)),)),
        lambda: Piece(offset_bytes=0, shape=(3,), regions=(Region.whole((2,)),)),
        lambda: Piece(offset_bytes=0, shape=(0,), regions=(Region.whole((0,)),)),
        lambda: Cut(parcel=parcel, start=2, stop=2),
        lambda: Cut(parcel=parcel, start=0, stop=4),
        lambda: cut((parcel,), 2, 2),
    ):
        with pytest.raises(UsageError):
            call()
