"""DDP's all-reduces made few: what is fused, what is not, and with which numbers."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._guards import detect_fake_mode
from torch._inductor.fx_passes import ddp_fusion as theirs
from torch._inductor.virtualized import V

from comm_graphs import all_reduce, capture, check_same, comm, count, integers, name, ops, wait
from shoal.errors import UsageError
from shoal.passes import count_traffic
from shoal.passes.ddp_fusion import (
    fuse_ddp_communication,
    fuse_ddp_with_coalesced_op,
    fuse_ddp_with_concat_op,
    get_all_comm_blocks,
    move_block_after,
    move_block_before,
    schedule_comm_wait,
)

FUSIONS = {
    fuse_ddp_with_concat_op: "all_reduce",
    fuse_ddp_with_coalesced_op: "all_reduce_coalesced",
}
fused = pytest.mark.parametrize("fuse", FUSIONS, ids=lambda fuse: FUSIONS[fuse])
MB = 1024**2


def layers(scale: Callable[[Tensor], Tensor] = lambda x: x / 2) -> Callable[..., list[Tensor]]:
    """Gradients as they come up in backward: reduced and waited for, one after the other."""

    def fn(x: Tensor, *weights: Tensor) -> list[Tensor]:
        gradients = []
        for weight in weights:
            x = torch.relu(x @ weight)
            gradients.append(wait(all_reduce(scale(x + 0))))
        return [*gradients, x.sum()]

    return fn


def square(num: int, size: int = 4, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [integers(size, size, dtype=dtype).sign() for _ in range(num)]


@fused
@pytest.mark.parametrize("mode", ["fake", "real", "symbolic"])
def test_many_become_one(fuse, mode):
    module = capture(layers(), *square(5), mode=mode)
    assert count_traffic(module.graph).num_collectives == 4
    check_same(module, square(5), functools.partial(fuse, bucket_size_mb=25))
    assert count(module.graph, FUSIONS[fuse]) == 1
    assert count_traffic(module.graph).num_collectives == 1
    assert counters["inductor"]["ddp_buckets"] == 1


@fused
@pytest.mark.parametrize(
    ("elements", "bucket_size_mb"),
    [
        ([100] * 6, 25),
        ([300_000, 10, 300_000, 10, 300_000], 1),
        ([300_000, 300_000, 300_000, 300_000, 5, 5], 2),
        ([5, 600_000, 5, 600_000, 5, 600_000], 3),
        ([1_000_000, 5, 1_000_000, 5, 1_000_000, 5, 1_000_000, 5], 7),
    ],
)
def test_buckets_are_torchs(fuse, elements, bucket_size_mb):
    """As many buckets as torch's pass, of the same sizes, and the same counter."""

    def fn(*grads: Tensor) -> list[Tensor]:
        return [wait(all_reduce(one / 2)) for one in grads]

    shapes = [torch.empty(one) for one in elements]
    mine, other = capture(fn, *shapes), capture(fn, *shapes)
    counters.clear()
    with V.set_fake_mode(
        detect_fake_mode([one.meta["val"] for one in list(other.graph.nodes)[:1]])
    ):
        getattr(theirs, fuse.__name__)(other.graph, bucket_size_mb)
    expected = counters["inductor"].pop("ddp_buckets")
    fuse(mine.graph, bucket_size_mb)
    assert counters["inductor"]["ddp_buckets"] == expected
    sizes = [[block.num_bytes for block in get_all_comm_blocks(one.graph)] for one in (mine, other)]
    assert sizes[0] == sizes[1]


@fused
def test_keys_do_not_mix(fuse):
    """Type, group, operation, divisor: torch's pass looks at none of them but the last."""
    other = dist.new_group([0]).group_name

    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        reduced = [
            *(all_reduce(x / 2), all_reduce(y / 2), all_reduce(x / 4), all_reduce(x / 2, "max")),
            *(comm.all_reduce(x / 2, "sum", other), all_reduce((x + 1) / 2)),
            *(all_reduce((y + 1) / 2), all_reduce(x.int() / 2), all_reduce((x + 2) / 4)),
        ]
        return [wait(one) for one in reduced]

    args = integers(4, 3), integers(5, dtype=torch.bfloat16)
    module = check_same(capture(fn, *args), args, functools.partial(fuse, bucket_size_mb=25))
    # float /2 (2), bfloat16 /2 (2), float /4 (2); max, the other group and integers are alone
    assert count_traffic(module.graph).num_collectives == 6
    assert counters["inductor"]["ddp_buckets"] == 6


def half_after(x: Tensor) -> list[Tensor]:
    return [wait(all_reduce(x + i)) / 2 for i in range(3)]


def half_after_and_cast(x: Tensor) -> list[Tensor]:
    half = [(x + i).to(torch.bfloat16) for i in range(3)]
    return [(wait(all_reduce(one)) / 2).to(torch.float32).view(-1) for one in half]


def averaged(x: Tensor) -> list[Tensor]:
    return [wait(all_reduce(x + i, "avg")) for i in range(3)]


def multiplied(x: Tensor) -> list[Tensor]:
    return [wait(all_reduce((x + i) * 0.5)) for i in range(3)]


def by_a_tensor(x: Tensor) -> list[Tensor]:
    two = torch.full((), 2.0)
    return [wait(all_reduce((x + i) / two)) for i in range(3)]


def in_place(x: Tensor) -> list[Tensor]:
    return [wait(comm.all_reduce_((x + i) / 2, "sum", name())) for i in range(3)]


def in_lists(x: Tensor) -> list[Tensor]:
    pairs = [[(x + i) / 2, (x - i).view(-1) / 2] for i in range(3)]
    lists = [comm.all_reduce_coalesced(pair, "sum", name()) for pair in pairs]
    return [wait(one) for pair in lists for one in pair]


def scaled_and_used(x: Tensor) -> list[Tensor]:
    halves = [(x + i) / 2 for i in range(3)]
    return [wait(all_reduce(one)) for one in halves] + [one + 1 for one in halves]


def into_gradients(x: Tensor) -> list[Tensor]:
    kept = [torch.zeros_like(x) for _ in range(3)]
    return [one.copy_(wait(all_reduce((x + i) / 2))) for i, one in enumerate(kept)]


@fused
@pytest.mark.parametrize(
    "fn",
    [
        *(half_after, half_after_and_cast, multiplied, by_a_tensor, in_place, in_lists),
        *(scaled_and_used, into_gradients),
    ],
    ids=lambda fn: fn.__name__,
)
def test_variants_are_fused(fuse, fn):
    args = (integers(3, 4),)
    module = check_same(capture(fn, *args), args, functools.partial(fuse, bucket_size_mb=25))
    assert count_traffic(module.graph).num_collectives == 1
    op = FUSIONS[fuse] + ("_" if fn is in_place else "")
    assert count(module.graph, op) == 1


@fused
def test_averages_need_no_division(fuse):
    graph = capture(averaged, integers(3, 4)).graph  # gloo has no average: not run
    fuse(graph, 25)
    assert count_traffic(graph).num_collectives == 1


def used_by_compute(x: Tensor) -> list[Tensor]:
    return [wait(all_reduce((x + i) / 2)) + 1 for i in range(3)]


def used_twice(x: Tensor) -> list[Tensor]:
    reduced = [wait(all_reduce((x + i) / 2)) for i in range(3)]
    return reduced + [one.view(-1) for one in reduced]


def plain_sums(x: Tensor) -> list[Tensor]:
    return [wait(all_reduce(x + i)) for i in range(3)]


def seen_in_place(x: Tensor) -> list[Tensor]:
    halves = [(x + i) / 2 for i in range(3)]
    views = [one.view(-1) for one in halves]
    done = [wait(comm.all_reduce_(one, "sum", name())) for one in halves]
    return [*done, *(one * 2 for one in views)]


@fused
@pytest.mark.parametrize(
    "fn", [used_by_compute, used_twice, plain_sums, seen_in_place], ids=lambda fn: fn.__name__
)
def test_what_is_no_gradient_stays(fuse, fn):
    counters.clear()
    args = (integers(3, 4),)
    module = check_same(capture(fn, *args), args, functools.partial(fuse, bucket_size_mb=25))
    assert count_traffic(module.graph).num_collectives == 3
    assert "ddp_buckets" not in counters["inductor"]


@fused
def test_shapes_of_all_kinds(fuse):
    """Scalars, nothing at all, transposed and expanded tensors come back as they were."""

    def fn(x: Tensor) -> list[Tensor]:
        grads = [x.sum(), x[:0] + 1, x.t() + 1, x[:1].expand(5, 4), x.permute(1, 0).view(2, 2, 3)]
        return [wait(all_reduce(one / 2)) for one in grads]

    args = (integers(3, 4),)
    module = capture(fn, *args)
    assert [one.stride() for one in module(*args)] == [(), (4, 1), (3, 1), (4, 1), (6, 3, 1)]
    strides = [one.meta["val"].stride() for one in list(module.graph.nodes)[-1].args[0]]
    check_same(module, args, functools.partial(fuse, bucket_size_mb=25))
    results = list(module.graph.nodes)[-1].args[0]
    assert [one.meta["val"].stride() for one in results] == strides
    assert [one.stride() for one in module(*args)] == strides


@fused
def test_no_path_between_members(fuse):
    """The second gradient is computed from the first one, reduced."""

    def fn(x: Tensor) -> list[Tensor]:
        first = wait(all_reduce(x / 2)).view(-1)
        kept = torch.zeros(4).copy_(first)
        return [wait(all_reduce((kept + 1) / 2)), wait(all_reduce((x + 1) / 2)), kept]

    args = (integers(4),)
    module = check_same(capture(fn, *args), args, functools.partial(fuse, bucket_size_mb=25))
    assert count_traffic(module.graph).num_collectives == 2


@fused
def test_values_are_taken_before_they_are_overwritten(fuse):
    """The first gradient's memory is used again before the second one is there."""

    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        scratch = x + 1
        first = wait(all_reduce(scratch / 2))
        scratch.copy_(y)
        second = wait(all_reduce((scratch + 1) / 2))
        return [first, second]

    args = integers(4), integers(4)
    module = check_same(capture(fn, *args), args, functools.partial(fuse, bucket_size_mb=25))
    assert count_traffic(module.graph).num_collectives == 2, "one waits for the other's memory"


@fused
def test_metadata_of_new_nodes(fuse):
    module = capture(layers(), *square(5))
    old = set(module.graph.nodes)
    fuse(module.graph, 25)
    new = [node for node in module.graph.nodes if node not in old]
    assert new
    for node in new:
        held = (
            node.meta["val"] if isinstance(node.meta["val"], list | tuple) else [node.meta["val"]]
        )
        said = node.meta["tensor_meta"]
        said = said if isinstance(held, list) and not hasattr(said, "shape") else [said]
        assert [(one.shape, one.dtype, one.stride()) for one in held] == [
            (one.shape, one.dtype, one.stride) for one in said
        ]


def test_a_second_time_changes_nothing():
    for fuse in FUSIONS:
        graph = capture(layers(), *square(5)).graph
        fuse(graph, 25)
        once = ops(graph)
        fuse(graph, 25)
        assert ops(graph) == once


def test_passes_by_name_and_as_functions():
    seen: list[Any] = []

    def mine(graph: fx.Graph, bucket_size_mb: float) -> None:
        seen.append(bucket_size_mb)

    module = capture(layers(), *square(5))
    passes = [mine, "fuse_ddp_with_concat_op", lambda graph: seen.append(graph), schedule_comm_wait]
    check_same(module, square(5), lambda graph: fuse_ddp_communication(graph, passes, 25))
    assert seen == [25, module.graph]
    assert count_traffic(module.graph).num_collectives == 1


def test_unknown_passes_and_sizes_are_refused_before_anything_runs():
    graph = capture(layers(), *square(5)).graph
    before = ops(graph)
    with pytest.raises(UsageError, match=r"schedule_comm_wait, got 'fuse_all'"):
        fuse_ddp_communication(graph, ["fuse_ddp_with_concat_op", "fuse_all"], 25)
    assert ops(graph) == before
    with pytest.raises(UsageError, match="above 0 MB, got 0"):
        fuse_ddp_with_concat_op(graph, 0)


def test_waits_come_right_before_their_first_use():
    def fn(x: Tensor, y: Tensor) -> Tensor:
        first, second = wait(all_reduce(x)).view(2, 2).split(1)
        for _ in range(3):
            y = torch.relu(y @ y)
        return (y + first) * second

    args = integers(4), integers(2, 2).sign()
    module = check_same(capture(fn, *args), args, schedule_comm_wait)
    order = ops(module.graph)
    assert order[0] == "all_reduce"
    assert order.index("wait_tensor") > max(i for i, one in enumerate(order) if one == "relu")
    assert order[order.index("wait_tensor") :][:4] == ["wait_tensor", "view", "split", "getitem"]


def test_waits_of_other_collectives_stay():
    def fn(x: Tensor) -> Tensor:
        gathered = wait(comm.all_gather_into_tensor(x, 1, name()))
        return torch.relu(x) + gathered

    module = check_same(capture(fn, integers(4)), (integers(4),), schedule_comm_wait)
    assert ops(module.graph)[:2] == ["all_gather_into_tensor", "wait_tensor"]


def test_moving_keeps_the_order_of_a_block():
    graph = fx.Graph()
    x = graph.placeholder("x")
    chain = [graph.call_function(operator.neg, (x,))]
    chain += [graph.call_function(operator.neg, (chain[-1],)) for _ in range(2)]
    end = graph.call_function(operator.pos, (x,))
    output = graph.output((chain[-1], end))
    move_block_before(chain, output)
    graph.lint()
    assert list(graph.nodes) == [x, end, *chain, output]
    move_block_after(chain, x)
    graph.lint()
    assert list(graph.nodes) == [x, *chain, end, output]
    theirs.move_block_before(chain, output)
    with pytest.raises(RuntimeError, match="used before it has been defined"):
        graph.lint()  # why these are not torch's
