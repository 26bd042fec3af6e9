from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pure.layout.strategies import profile, shapes
from shoal.errors import UsageError
from shoal.layout import Region
from shoal.layout.region import flat_regions, flat_span


@st.composite
def regions_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    sizes = tuple(draw(st.integers(0, s - o)) for s, o in zip(shape, offsets, strict=True))
    return Region(offsets=offsets, sizes=sizes)


def elements(shape: tuple[int, ...], region: Region | None) -> set[int]:
    if region is None:
        return set()
    return set(torch.arange(math.prod(shape)).view(shape)[region.slices].reshape(-1).tolist())


@profile(120)
@given(shape=shapes, data=st.data())
def test_a_flat_range_is_a_few_regions_in_order(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    regions = flat_regions(shape, start, stop)
    ids = torch.arange(numel).view(shape)
    found = [i for region in regions for i in ids[region.slices].reshape(-1).tolist()]
    assert found == list(range(start, stop))
    assert len(regions) <= max(2 * len(shape) - 1, 1)
    assert all(region.numel > 0 for region in regions)


def test_the_flat_range_that_the_docstring_draws() -> None:
    assert flat_regions((3, 4), 2, 9) == (
        Region(offsets=(0, 2), sizes=(1, 2)),
        Region(offsets=(1, 0), sizes=(1, 4)),
        Region(offsets=(2, 0), sizes=(1, 1)),
    )


def test_a_0d_tensor_is_one_element() -> None:
    assert flat_regions((), 0, 1) == (Region(offsets=(), sizes=()),)
    assert flat_regions((), 0, 0) == ()
    assert Region.whole(()).numel == 1
    assert torch.tensor(3.0)[Region.whole(()).slices].item() == 3.0


@profile(100)
@given(shape=shapes, data=st.data())
def test_overlap_contains_and_span_agree_with_sets(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    a, b = data.draw(regions_in(shape)), data.draw(regions_in(shape))
    in_a, in_b = elements(shape, a), elements(shape, b)
    common = a.overlap(b)
    assert elements(shape, common) == in_a & in_b
    assert (common is None) == (not in_a & in_b)
    assert a.contains(b) == (in_b <= in_a)
    assert flat_span(shape, a) == ((min(in_a), max(in_a) + 1) if in_a else (0, 0))
    if common is not None:
        ids = torch.arange(math.prod(shape)).view(shape)
        inside = ids[a.slices][common.relative_to(a).slices]
        assert torch.equal(inside, ids[common.slices])


@pytest.mark.parametrize(
    "call",
    [
        lambda: Region(offsets=(0,), sizes=()),
        lambda: Region(offsets=(-1,), sizes=(1,)),
        lambda: Region(offsets=(0,), sizes=(-1,)),
        lambda: Region.whole((2,)).overlap(Region.whole((2, 2))),
        lambda: Region.whole((3,)).relative_to(Region.whole((2,))),
        lambda: flat_regions((2, 2), 0, 5),
        lambda: flat_regions((2, 2), 3, 2),
        lambda: flat_span((2,), Region.whole((3,))),
    ],
)
def test_wrong_regions_are_refused(call) -> None:
    with pytest.raises(UsageError):
        call()
