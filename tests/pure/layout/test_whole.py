from __future__ import annotations

import pytest
from hypothesis import given

from pure.layout.strategies import param_lists, profile, spec, transformer_block, worlds
from shoal.errors import UsageError
from shoal.layout import ParamSpec, Whole
from shoal.layout.spec import round_up
from shoal.layout.whole import WholePacking


@profile(100)
@given(params=param_lists(), world_size=worlds)
def test_each_parameter_has_one_owner_and_loads_are_balanced(
    params: list[ParamSpec], world_size: int
) -> None:
    packing = Whole().pack(params, world_size)
    step = max((param.align_bytes for param in params), default=1)
    sizes = [round_up(param.nbytes, step) for param in params]
    # Dealing to the least loaded keeps every rank within one parameter of the average.
    assert packing.shard_bytes <= sum(sizes) / world_size + max(sizes, default=0) + step
    for index, param in enumerate(params):
        assert packing.is_zero_copy(index)
        held = [packing.piece(index, rank) for rank in range(world_size)]
        assert [piece.shape for piece in held if piece.numel] == [param.shape] * (param.numel > 0)


def test_the_largest_is_dealt_first() -> None:
    params = [spec("a", 16), spec("b", 16), spec("c", 32), spec("d", 64)]
    packing = Whole().pack(params, 2)
    assert packing.owners == (1, 1, 1, 0)
    assert packing.shard_bytes == 4 * 64
    assert packing.offsets_bytes == (0, 64, 128, 0)


def test_dealing_depends_on_nothing_but_the_parameters() -> None:
    params = transformer_block()
    assert len({Whole().pack(params, 4).owners for _ in range(3)}) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"owners": (0, 2)},
        {"owners": (0, -1)},
        {"owners": (0, 0)},  # both at byte 0 of rank 0
        {"offsets_bytes": (0, 4)},
        {"offsets_bytes": (0, 64)},  # ends beyond the shard
        {"offsets_bytes": (-64, 0)},
        {"shard_bytes": 100},
        {"owners": (0,)},
        {"offsets_bytes": (0,)},
    ],
)
def test_a_wrong_packing_cannot_be_built(change: dict) -> None:
    right = {
        "params": (spec("a", 16), spec("b", 16)),
        "world_size": 2,
        "shard_bytes": 64,
        "owners": (0, 1),
        "offsets_bytes": (0, 0),
    }
    assert WholePacking(**right) == Whole().pack(right["params"], 2)
    with pytest.raises(UsageError):
        WholePacking(**{**right, **change})
