from __future__ import annotations

import pytest
import torch

from pure.layout.strategies import random_tensors, spec
from shoal.errors import UsageError
from shoal.layout import Even, Flat, Packing, Rows
from shoal.layout.buffer import full_tensors, shard_of, shard_views
from shoal.layout.stripe import Stripe

PARAMS = [spec("w", 10, 4), spec("b", 10)]


def gathered_of(packing: Packing, tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([shard_of(packing, rank, tensors) for rank in range(packing.world_size)])


def test_zero_copy_parameters_are_views_and_others_are_not() -> None:
    for layout, is_view in ((Rows(), True), (Even(), False)):
        packing = layout.pack(PARAMS, 2)
        gathered = gathered_of(packing, random_tensors(PARAMS))
        tensors = full_tensors(packing, gathered)
        gathered.zero_()
        assert all(bool((tensor == 0).all()) == is_view for tensor in tensors)


def test_local_tensors_are_views() -> None:
    packing = Even().pack(PARAMS, 2)
    shard = torch.zeros(packing.shard_bytes, dtype=torch.uint8)
    for view in shard_views(packing, 0, shard):
        view.fill_(1.0)
    assert full_tensors(packing, torch.cat([shard, shard]))[1].tolist() == [1.0] * 10


def test_padding_is_zero() -> None:
    packing = Even().pack(PARAMS, 3)
    ones = [torch.ones(param.shape) for param in PARAMS]
    shards = [shard_of(packing, rank, ones) for rank in range(3)]
    assert sum(shard.view(torch.float32).sum().item() for shard in shards) == 50


def test_tensors_that_need_grad_or_are_not_contiguous_can_be_packed() -> None:
    packing = Flat().pack(PARAMS, 2)
    w = torch.randn(4, 10).t().requires_grad_()
    b = torch.randn(20)[::2]
    got_w, got_b = full_tensors(packing, gathered_of(packing, [w, b]))
    assert torch.equal(got_w, w)
    assert torch.equal(got_b, b)
    assert not got_w.requires_grad


def test_wrong_buffers_and_tensors_are_refused() -> None:
    packing = Even().pack(PARAMS, 2)
    good = random_tensors(PARAMS)
    for call in (
        lambda: shard_of(packing, 0, good[:1]),
        lambda: shard_of(packing, 2, good),
        lambda: shard_of(packing, 0, [good[0].half(), good[1]]),
        lambda: shard_of(packing, 0, [good[0].t(), good[1]]),
        lambda: shard_views(packing, 0, torch.empty(3, dtype=torch.uint8)),
        lambda: full_tensors(packing, torch.empty(packing.gathered_bytes // 4)),
    ):
        with pytest.raises(UsageError):
            call()


@pytest.mark.parametrize(
    "change",
    [
        {"first_rank": -1},
        {"num_ranks": 0},
        {"shard_offset": -1},
        {"full_offset": -1},
        {"numel": 0},
        {"num_bands": 0},
    ],
)
def test_a_wrong_stripe_cannot_be_built(change: dict[str, int]) -> None:
    right = {"first_rank": 0, "num_ranks": 1, "shard_offset": 0, "full_offset": 0, "numel": 1}
    Stripe(**right)
    with pytest.raises(UsageError):
        Stripe(**{**right, **change})
