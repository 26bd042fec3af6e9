"""Fetching regions, on ranks of this process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from pure.layout.strategies import (
    DTYPES,
    any_shapes,
    assert_same_bits,
    profile,
    random_tensors,
    spec,
)
from pure.tensor.tilings import Kind, kinds, sharded
from shoal.comm.local import run_local
from shoal.errors import UsageError
from shoal.layout import Flat, ParamSpec, Region, Rows
from shoal.tensor.gather import fetch

WHOLE = torch.arange(6 * 8, dtype=torch.float32).view(6, 8)


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region | None:
    """Any rectangle, also an empty one; or nothing."""
    if draw(st.integers(0, 4)) == 0:
        return None
    bounds = [sorted(draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape]
    return Region(offsets=tuple(a for a, _ in bounds), sizes=tuple(b - a for a, b in bounds))


def fetch_own(
    param: ParamSpec, kind: Kind, asked: list[Region | None], device: str = "cpu"
) -> None:
    whole = random_tensors([param])[0].to(device)
    region = asked[dist.get_rank()]
    got = fetch(sharded(whole, kind), region)
    if region is None:
        assert got is None
    else:
        assert got is not None
        assert not got.requires_grad
        assert_same_bits([got], [whole[region.slices]])


@profile(120)
@given(data=st.data())
def test_every_rank_gets_what_it_asks_for(data: st.DataObject) -> None:
    shape = data.draw(any_shapes)
    world_size = data.draw(st.integers(1, 5))
    param = spec("w", *shape, dtype=data.draw(st.sampled_from(DTYPES)))
    asked = [data.draw(regions(shape)) for _ in range(world_size)]
    run_local(world_size, fetch_own, param, data.draw(kinds(shape, world_size)), asked)


def by_slices() -> None:
    tensor = sharded(WHOLE, Flat()).requires_grad_()
    got = fetch(tensor, (slice(1, 4), slice(-3, None)))
    assert got is not None
    assert torch.equal(got, WHOLE[1:4, -3:])
    assert not got.requires_grad
    got = fetch(tensor, (slice(4, 2),))
    assert got is not None
    assert got.shape == (0, 8)


def test_slices_name_a_region() -> None:
    run_local(3, by_slices)


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (Region(offsets=(3, 0), sizes=(4, 8)), "not inside a tensor of shape"),
        (Region(offsets=(3,), sizes=(1,)), "not inside a tensor of shape"),
        ((slice(0, 6, 2), slice(0, 8)), "a step of 1"),
        ((slice(None),) * 3, "3 slices"),
        (7, "expected a Region, a tuple of slices, or None, got 7"),
    ],
)
def test_all_ranks_raise_when_one_asks_for_what_is_not_there(asked: object, problem: str) -> None:
    def rank() -> str:
        tensor = sharded(WHOLE, Rows())
        with pytest.raises(UsageError, match=r"on ranks \[1\] of the group") as raised:
            fetch(tensor, asked if dist.get_rank() == 1 else None)  # pyright: ignore
        return str(raised.value)

    messages = run_local(3, rank)
    assert problem in messages[1]
    assert problem not in messages[0]
