"""The host's work depends on the parameters, never on how many ranks there are."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from pure.layout.strategies import Held, spec, transformer_block
from shoal.layout import Block, Even, Flat, Layout, Packing, Region, Rows, Whole, incoming

LAYOUTS = [Even(), Even(1), Flat(), Rows(), Block(128), Whole()]
PARAMS = [param for param in transformer_block() if len(param.shape) == 2]


def count_calls(work: Callable[[], object]) -> int:
    """How many functions, Python's and C's, are called: a clock that never jitters."""
    calls = 0

    def on_event(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def use(packing: Packing) -> None:
    """Ask everything a rank needs to know."""
    packing.pieces(packing.world_size - 1)
    for index, param in enumerate(packing.params):
        packing.stripes(index)
        packing.is_zero_copy(index)
        packing.holders(index, Region.whole(param.shape))
    packing.with_dtypes([param.dtype for param in packing.params])


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_4096_ranks_cost_what_2_do(layout: Layout) -> None:
    few = count_calls(lambda: use(layout.pack(PARAMS, 2)))
    many = count_calls(lambda: use(layout.pack(PARAMS, 4096)))
    # Rows and blocks may need a second search for a shard without gaps, as often with 2 ranks.
    assert many <= 2 * few


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_cost_is_linear_in_parameters(layout: Layout) -> None:
    few = [spec(f"p{index}", 64, 64) for index in range(10)]
    many = [spec(f"p{index}", 64, 64) for index in range(80)]
    costs = [count_calls(lambda p=p: use(layout.pack(p, 64))) for p in (few, many)]
    assert costs[1] <= 8 * 2 * costs[0]


@pytest.mark.parametrize("layout", [Even(), Flat(), Rows(), Block(128)], ids=repr)
def test_parcels_between_4096_ranks_cost_what_parcels_between_2_do(layout: Layout) -> None:
    def parcels(world_size: int) -> Callable[[], object]:
        src, dst = Flat().pack(PARAMS, world_size), layout.pack(PARAMS, world_size)
        return lambda: [
            incoming(Held(src, index), Held(dst, index), rank)
            for index in range(len(PARAMS))
            for rank in (0, world_size - 1)
        ]

    assert count_calls(parcels(4096)) <= 2 * count_calls(parcels(2)) + 200
