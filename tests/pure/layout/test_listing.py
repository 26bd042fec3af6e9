from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pure.layout.strategies import profile
from pure.layout.test_cost import count_calls
from shoal.layout import Region, incoming
from shoal.layout.listing import Listing


def rows(first: int, last: int, width: int = 4) -> Region:
    return Region(offsets=(first, 0), sizes=(last - first, width))


sizes = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
offsets = st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4))
any_regions = st.builds(lambda o, s: Region(offsets=o, sizes=s), offsets, sizes)


@profile(200)
@given(held=st.lists(st.tuples(st.integers(0, 5), any_regions), max_size=12), region=any_regions)
def test_holders_are_those_that_a_walk_finds(
    held: list[tuple[int, Region]], region: Region
) -> None:
    listing = Listing(held)
    found = {rank for rank, each in held if each.overlap(region) is not None}
    assert listing.holders(region) == tuple(sorted(found))
    for rank in range(6):
        own = tuple(each for owner, each in held if owner == rank and each.numel > 0)
        assert listing.regions_of(rank) == own
    assert listing.ranks == tuple(sorted({rank for rank, each in held if each.numel > 0}))
    assert listing.numel == sum(each.numel for _, each in held)


def test_a_number_is_held_too() -> None:
    number = Region.whole(())
    assert Listing([(3, number)]).holders(number) == (3,)
    assert Listing([]).holders(number) == ()


def test_looking_up_costs_what_is_found_and_not_what_is_listed() -> None:
    def chunks(num_ranks: int) -> Listing:
        return Listing((rank, rows(8 * rank, 8 * rank + 8)) for rank in range(num_ranks))

    few, many = chunks(4), chunks(4096)
    # Moved by half a chunk, so that every rank needs two others.
    shifted = [Listing([(0, rows(4, 12))]), Listing([(0, rows(8 * 4000 + 4, 8 * 4000 + 12))])]
    costs = [
        count_calls(lambda h=h, w=w: incoming(h, w, 0))
        for h, w in zip((few, many), shifted, strict=True)
    ]
    assert costs[1] <= costs[0] + 4
    assert list(incoming(many, shifted[1], 0)) == [4000, 4001]
