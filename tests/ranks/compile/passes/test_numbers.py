"""Passes over graphs on several ranks: the same numbers, fewer collectives."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import Tensor

from comm_graphs import all_reduce, capture, check_same, gather, integers, scatter, wait
from comm_programs import Step, inputs, program, programs
from harness import ranks
from shoal.passes import (
    Limits,
    bucket_all_gathers,
    bucket_all_reduces,
    bucket_reduce_scatters,
    count_traffic,
    overlap,
    replicated,
    sharded,
)

BUCKETS = {
    "gathers": bucket_all_gathers,
    "scatters": bucket_reduce_scatters,
    "gathers together": functools.partial(bucket_all_gathers, together=True),
    "scatters together": functools.partial(bucket_reduce_scatters, together=True),
    "reduces": bucket_all_reduces,
}
START = {"gathers": gather, "scatters": scatter, "reduces": all_reduce}


@ranks(2, 4)
@pytest.mark.parametrize("kind", BUCKETS)
def test_buckets_give_the_same_numbers(kind, world_size):
    start = START[kind.split()[0]]

    def fn(*shards: Tensor) -> list[Tensor]:
        return [torch.relu(wait(start(one))) for one in shards]

    args = integers(4, 3), integers(8), integers(3, 4).t(), integers(0, 4), integers(4, 1, 5)
    run = functools.partial(BUCKETS[kind], limits=Limits(num_bytes=1 << 20))
    module = check_same(capture(fn, *args), args, run)
    assert count_traffic(module.graph).num_collectives == 1


@ranks(2)
def test_gathers_and_scatters_keep_every_bit():
    """Reductions of any floats: two ranks add up in one order only."""
    torch.manual_seed(dist.get_rank())
    args = torch.randn(4, 3), torch.randn(8, 5), torch.randn(4)

    def fn(*shards: Tensor) -> list[Tensor]:
        return [wait(scatter(one)) for one in shards] + [wait(gather(one)) for one in shards]

    pipeline = sharded(bucket_bytes=1 << 20, max_in_flight_bytes=None)
    module = check_same(capture(fn, *args), args, pipeline.run)
    assert count_traffic(module.graph).num_collectives == 2


@ranks(2)
@pytest.mark.parametrize("coalesced", [False, True])
def test_gradients_keep_every_bit(coalesced):
    torch.manual_seed(dist.get_rank())
    args = tuple(torch.randn(5, 7).to(dtype) for dtype in (torch.float32, torch.bfloat16) * 3)

    def fn(*grads: Tensor) -> list[Tensor]:
        return [wait(all_reduce(one / 2)) for one in grads]

    pipeline = replicated(bucket_size_mb=25, coalesced=coalesced)
    module = check_same(capture(fn, *args), args, pipeline.run)
    assert count_traffic(module.graph).num_collectives == 2


@ranks(4)
def test_groups_of_two_axes():
    """As in HSDP: gathers and scatters along one axis, all-reduces along the other."""
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2].group_name
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2].group_name
    comm = torch.ops._c10d_functional

    def fn(x: Tensor, *shards: Tensor) -> list[Tensor]:
        weights = [wait(comm.all_gather_into_tensor(one, 2, rows)) for one in shards]
        for weight in weights:
            x = torch.relu(x @ weight)
        scattered = [
            wait(comm.reduce_scatter_tensor(x.t() @ x + weight, "sum", 2, rows))
            for weight in weights
        ]
        return [wait(comm.all_reduce(one / 4, "sum", columns)) for one in scattered]

    args = (integers(4, 4), *(integers(2, 4).sign() for _ in range(4)))
    pipeline = sharded(bucket_bytes=128, max_in_flight_bytes=256)
    module = check_same(capture(fn, *args), args, pipeline.run)
    traffic = count_traffic(module.graph)
    assert traffic.num_collectives == 2 + 2 + 1
    assert traffic.max_in_flight_bytes <= 256


@settings(max_examples=12)
@given(steps=programs(16))
@ranks(2, timeout_s=30)
def test_programs_survive_on_two_ranks(steps: list[Step]) -> None:
    fn = program(steps)
    pipeline = sharded(bucket_bytes=512, max_in_flight_bytes=256)
    for run in (overlap, pipeline.run, replicated(bucket_size_mb=25).run):
        check_same(capture(fn, *inputs()), inputs(), run)
