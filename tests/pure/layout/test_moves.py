from __future__ import annotations

import pytest
import torch
from hypothesis import given

from pure.layout.strategies import packing_pairs, profile, random_tensors, spec
from shoal.errors import UsageError
from shoal.layout import Block, Even, Flat, Packing, Region, Rows, Whole, moves_from, moves_to
from shoal.layout.buffer import apply_moves, shard_of
from shoal.layout.moves import Copy, copies
from shoal.layout.piece import Piece, Stored


@profile(160)
@given(pair=packing_pairs())
def test_moves_carry_any_packing_to_any_other(pair: tuple[Packing, Packing]) -> None:
    src, dst = pair
    tensors = random_tensors(src.params)
    sources = [shard_of(src, rank, tensors) for rank in range(src.world_size)]
    want = [shard_of(dst, rank, tensors) for rank in range(dst.world_size)]
    targets = [torch.zeros_like(shard) for shard in want]
    for rank in range(dst.world_size):
        apply_moves(src.params, moves_to(src, dst, rank), sources.__getitem__, targets.__getitem__)
    assert all(torch.equal(a, b) for a, b in zip(targets, want, strict=True))


@profile(120)
@given(pair=packing_pairs())
def test_sender_and_receiver_agree_and_nothing_moves_twice(pair: tuple[Packing, Packing]) -> None:
    src, dst = pair
    received = [m for rank in range(dst.world_size) for m in moves_to(src, dst, rank)]
    sent = [m for rank in range(src.world_size) for m in moves_from(src, dst, rank)]
    assert len(set(received)) == len(received)
    assert set(received) == set(sent)
    assert len(sent) == len(received)
    for index, param in enumerate(src.params):
        count = torch.zeros(param.shape, dtype=torch.int64)
        for move in received:
            if move.index == index:
                count[move.copy.region.slices] += 1
        assert torch.equal(count, torch.ones_like(count))


def test_no_change_is_one_move_per_region() -> None:
    params = [spec("w", 30, 4), spec("b", 40)]
    for layout in (Even(), Flat(), Rows(), Block(16), Whole()):
        packing = layout.pack(params, 3)
        for rank in range(3):
            moves = list(moves_to(packing, packing, rank))
            assert all(m.src_rank == m.dst_rank and m.copy.src == m.copy.dst for m in moves)
            assert len(moves) == sum(len(piece.regions) for piece in packing.pieces(rank))


def test_a_rank_asks_only_those_that_hold_its_rows() -> None:
    """Going from 4096 to 2048 ranks, a rank receives from two."""
    params = [spec("w", 1 << 16, 64)]
    moves = list(moves_to(Even().pack(params, 4096), Even().pack(params, 2048), 100))
    assert [move.src_rank for move in moves] == [200, 201]


def test_regions_need_no_packing_on_the_other_side() -> None:
    """As when one side is a file."""
    stored = [
        Stored(offset_bytes=0, region=Region(offsets=(0, 0), sizes=(2, 6))),
        Stored(offset_bytes=48, region=Region(offsets=(2, 0), sizes=(3, 6))),
    ]
    wanted = [Stored(offset_bytes=0, region=Region(offsets=(1, 2), sizes=(2, 2)))]
    assert [copy.region for copy in copies(stored, wanted)] == [
        Region(offsets=(1, 2), sizes=(1, 2)),
        Region(offsets=(2, 2), sizes=(1, 2)),
    ]


def test_other_parameters_are_refused() -> None:
    one, two = spec("w", 4), spec("v", 4)
    half = spec("w", 4, dtype=torch.float16)
    for other in ([two], [half], [spec("w", 5)], [one, two], []):
        src, dst = Flat().pack([one], 2), Flat().pack(other, 2)
        with pytest.raises(UsageError, match="same parameters"):
            list(moves_to(src, dst, 0))
        with pytest.raises(UsageError, match="same parameters"):
            list(moves_from(src, dst, 0))


def test_wrong_values_cannot_be_built() -> None:
    small, large = Region.whole((2,)), Region.whole((3,))
    for call in (
        lambda: Stored(offset_bytes=-1, region=small),
        lambda: Piece(offset_bytes=-1, shape=(2,), regions=(small,)),
        lambda: Piece(offset_bytes=0, shape=(3,), regions=(small,)),
        lambda: Piece(offset_bytes=0, shape=(0,), regions=(Region.whole((0,)),)),
        lambda: Copy(
            region=large,
            src=Stored(offset_bytes=0, region=large),
            dst=Stored(offset_bytes=0, region=small),
        ),
    ):
        with pytest.raises(UsageError):
            call()
