"""Gathers, reduce-scatters and all-reduces in buckets."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from comm_graphs import (
    all_reduce,
    capture,
    check_same,
    comm,
    count,
    gather,
    integers,
    name,
    scatter,
    wait,
)
from shoal.comm.buckets import MIB
from shoal.errors import UsageError
from shoal.passes import (
    Limits,
    bucket_all_gathers,
    bucket_all_reduces,
    bucket_reduce_scatters,
    count_traffic,
    get_all_comm_blocks,
)

START = {
    bucket_all_gathers: gather,
    bucket_reduce_scatters: scatter,
    bucket_all_reduces: all_reduce,
}
each = pytest.mark.parametrize("bucket", START, ids=lambda one: one.__name__)
ALL = Limits(num_bytes=MIB)


def sizes(graph) -> list[int]:
    return [block.num_bytes for block in get_all_comm_blocks(graph)]


@each
@pytest.mark.parametrize("mode", ["fake", "real", "symbolic"])
def test_many_become_one(bucket, mode):
    start = START[bucket]

    def fn(*shards: Tensor) -> list[Tensor]:
        return [torch.relu(wait(start(one))) for one in shards]

    args = integers(4, 3), integers(2), integers(3, 2).t(), integers(0, 4), integers(2, 1, 5)
    module = check_same(capture(fn, *args, mode=mode), args, functools.partial(bucket, limits=ALL))
    assert count_traffic(module.graph).num_collectives == 1


@each
def test_lists_become_one(bucket):
    op = {
        bucket_all_gathers: lambda xs: comm.all_gather_into_tensor_coalesced(xs, 1, name()),
        bucket_reduce_scatters: lambda xs: comm.reduce_scatter_tensor_coalesced(
            xs, "sum", 1, name()
        ),
        bucket_all_reduces: lambda xs: comm.all_reduce_coalesced(xs, "sum", name()),
    }[bucket]

    def fn(*shards: Tensor) -> list[Tensor]:
        return [wait(one) for pair in (op(list(shards[:2])), op(list(shards[2:]))) for one in pair]

    args = integers(4, 3), integers(2), integers(6), integers(2, 2)
    module = check_same(capture(fn, *args), args, functools.partial(bucket, limits=ALL))
    assert count_traffic(module.graph).num_collectives == 1


@each
def test_keys_do_not_mix(bucket):
    start = START[bucket]
    other = dist.new_group([0]).group_name

    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        started = [start(x), start(y), start(x + 1), start(y + 1)]
        if bucket is bucket_all_gathers:
            started.append(comm.all_gather_into_tensor(x, 1, other))
        elif bucket is bucket_reduce_scatters:
            started += [comm.reduce_scatter_tensor(x, "sum", 1, other), scatter(x, "max")]
        else:
            started += [comm.all_reduce(x, "sum", other), all_reduce(x, "max")]
        return [wait(one) for one in started]

    args = integers(4), integers(4, dtype=torch.float64)
    module = capture(fn, *args)
    single = count_traffic(module.graph).num_collectives - 4
    check_same(module, args, functools.partial(bucket, limits=ALL))
    assert count_traffic(module.graph).num_collectives == 2 + single


@each
@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (Limits(num_bytes=32), [32, 32, 16]),
        (Limits(num_bytes=40), [32, 32, 16]),
        (Limits(num_bytes=8), [16, 16, 16, 16, 16]),
        (Limits(num_bytes=64, first_bytes=16), [16, 64]),
        (Limits(num_bytes=40, overshoot=True), [48, 32]),
        (Limits(num_bytes=32, first_bytes=8, overshoot=True), [16, 32, 32]),
    ],
    ids=str,
)
def test_sizes_are_bounded(bucket, limits, expected):
    start = START[bucket]

    def fn(*shards: Tensor) -> list[Tensor]:
        return [wait(start(one)) for one in shards]

    args = tuple(integers(4) for _ in range(5))
    module = check_same(capture(fn, *args), args, functools.partial(bucket, limits=limits))
    assert sizes(module.graph) == expected


@each
def test_no_path_between_members(bucket):
    start = START[bucket]

    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        first = wait(start(x))
        second = wait(start(first + y))
        return [second, wait(start(y))]

    args = integers(4), integers(4)
    module = check_same(capture(fn, *args), args, functools.partial(bucket, limits=ALL))
    assert sizes(module.graph) == [16, 32]


def test_no_path_through_another_bucket():
    """Two gathers and two of another type: a1 before b1, b2 before a2; only one pair can join."""

    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        a1 = wait(gather(x))
        b2 = wait(gather(y.double()))
        b1 = wait(gather(a1.double() + 1))
        a2 = wait(gather(b2.float() + 1))
        return [a1, a2, b1, b2]

    args = integers(4), integers(4)
    module = check_same(capture(fn, *args), args, functools.partial(bucket_all_gathers, limits=ALL))
    assert count_traffic(module.graph).num_collectives == 3


@each
def test_users_in_between_move_behind(bucket):
    """What uses the first result stands before the second input is there."""
    start = START[bucket]

    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        first = torch.relu(wait(start(x))) * 2
        later = torch.relu(y) + 1
        return [first, wait(start(later))]

    args = integers(4), integers(4)
    module = check_same(capture(fn, *args), args, functools.partial(bucket, limits=ALL))
    assert count_traffic(module.graph).num_collectives == 1


@each
def test_memory_is_no_short_cut(bucket):
    """No value goes from the first wait to the second collective, but bytes do."""
    start = START[bucket]

    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        view = y.view(2, 2)
        y.copy_(wait(start(x)))
        return [wait(start(view.view(-1))), wait(start(x))]

    args = integers(4), integers(4)
    module = check_same(capture(fn, *args), args, functools.partial(bucket, limits=ALL))
    assert sizes(module.graph) == [16, 32]


def test_given_memory_is_left_alone():
    def fn(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        return [
            wait(comm.all_gather_into_tensor_out(x + i, 1, name(), out=out))
            for i, out in enumerate((a, b))
        ]

    args = integers(4), integers(4), integers(4)
    module = check_same(capture(fn, *args), args, functools.partial(bucket_all_gathers, limits=ALL))
    assert count(module.graph, "all_gather_into_tensor_out") == 2


def test_limits_are_checked():
    with pytest.raises(UsageError, match="above 0, got num_bytes=0"):
        Limits(num_bytes=0)
    with pytest.raises(UsageError, match="above 0, got first_bytes=-1"):
        Limits(num_bytes=1, first_bytes=-1)
