"""Delivery between any two holdings, on ranks of this process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pure.layout.strategies import (
    DTYPES,
    Held,
    any_shapes,
    assert_same_bits,
    packing_pairs,
    profile,
    random_tensors,
    spec,
)
from pure.tensor.tilings import dealt
from shoal.comm.local import run_local
from shoal.errors import UsageError
from shoal.layout import Even, Flat, Holding, Packing
from shoal.tensor.transfer import ONE_ROUND_BYTES, ROUND_BYTES, num_rounds, transfer

CPU = torch.device("cpu")


def check_delivery(whole: Tensor, src: Holding, dst: Holding, world_size: int, rounds: int) -> None:
    """Deliver a whole tensor's elements, and compare where they arrive."""

    def rank() -> None:
        group = dist.group.WORLD
        assert group is not None
        have = [(r, whole[r.slices].clone()) for r in src.regions_of(group.rank())]
        want = [(r, torch.empty(r.sizes, dtype=whole.dtype)) for r in dst.regions_of(group.rank())]
        transfer(have, want, src, dst, group, device=CPU, rounds=rounds, reason="a test")
        assert_same_bits([t for _, t in want], [whole[r.slices] for r, _ in want])

    run_local(world_size, rank)


@profile(100)
@given(data=st.data())
def test_any_tiling_to_any_other(data: st.DataObject) -> None:
    shape = data.draw(any_shapes)
    world_size = data.draw(st.integers(1, 5))
    (whole,) = random_tensors([spec("w", *shape, dtype=data.draw(st.sampled_from(DTYPES)))])
    src, dst = data.draw(dealt(shape, world_size)), data.draw(dealt(shape, world_size))
    check_delivery(whole, src, dst, world_size, data.draw(st.integers(1, 4)))


@profile(60)
@given(pair=packing_pairs(), rounds=st.integers(1, 3))
def test_any_packing_to_any_other_of_any_world(pair: tuple[Packing, Packing], rounds: int) -> None:
    src, dst = pair
    world_size = max(src.world_size, dst.world_size)
    for index, whole in enumerate(random_tensors(src.params)):
        check_delivery(whole, Held(src, index), Held(dst, index), world_size, rounds)


@pytest.mark.parametrize("name", ["uint4", "float4_e2m1fn_x2", "float8_e8m0fnu", "uint16"])
def test_dtypes_that_torch_hardly_knows_travel_as_bits(name: str) -> None:
    """torch does not even copy some of them."""
    dtype = getattr(torch, name)
    raw = torch.arange(120 * dtype.itemsize, dtype=torch.uint8).view(6, 20 * dtype.itemsize)
    src, dst = (Held(layout.pack([spec("w", 6, 20)], 3), 0) for layout in (Even(1), Flat()))

    def rank() -> None:
        group = dist.group.WORLD
        assert group is not None
        wide = torch.empty(6, 20, dtype=dtype)
        whole = wide.view(torch.uint8).copy_(raw).view(dtype)
        have = [(r, whole[r.slices]) for r in src.regions_of(group.rank())]
        want = [(r, torch.empty(r.sizes, dtype=dtype)) for r in dst.regions_of(group.rank())]
        transfer(have, want, src, dst, group, device=CPU, rounds=2, reason="a test")
        for region, tensor in want:
            expected = whole[region.slices].view(torch.uint8)
            assert torch.equal(tensor.view(torch.uint8), expected)

    run_local(3, rank)


def test_rounds_keep_to_the_cap_whatever_ranks_hold() -> None:
    large = ONE_ROUND_BYTES + 1
    assert num_rounds(ONE_ROUND_BYTES, 4) == 1
    # Beside the new shard, one more: half of what is sent, half of what is received.
    assert num_rounds(large, 4) == 2
    assert num_rounds(large, 4, max_extra=3.0) == 1
    assert num_rounds(large, 4, max_extra=1.25) == 8
    assert num_rounds(large, 4, num_copies=3) == 4
    assert num_rounds(7 * 4 * ROUND_BYTES, 4) == 7
    for max_extra in (1.0, 0.0, float("nan")):
        with pytest.raises(UsageError, match=r"over 1\.0"):
            num_rounds(large, 4, max_extra=max_extra)
