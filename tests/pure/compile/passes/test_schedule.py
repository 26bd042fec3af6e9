"""When collectives start and are waited for."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from comm_graphs import (
    all_reduce,
    capture,
    check_same,
    comm,
    gather,
    integers,
    name,
    ops,
    scatter,
    wait,
)
from shoal.compile.lowering.gathered_rows import lay_in_row
from shoal.errors import UsageError
from shoal.passes import count_traffic, delay_waits, overlap

SIZE = 64
"""Bytes of each gathered weight."""


def layers(x: Tensor, *shards: Tensor) -> Tensor:
    """Each layer gathers its weight right where it needs it."""
    for shard in shards:
        x = torch.relu(x @ wait(gather(shard.to(torch.float32))))
    return x


def layer_args(num: int = 5) -> tuple[Tensor, ...]:
    shards = [integers(4, 4, dtype=torch.bfloat16).sign() for _ in range(num)]
    return (integers(2, 4), *shards)


def in_flight(graph) -> int:
    return count_traffic(graph).max_in_flight_bytes


def test_everything_starts_at_once_without_a_bound():
    module = check_same(capture(layers, *layer_args()), layer_args(), overlap)
    assert ops(module.graph)[:10] == ["_to_copy", "all_gather_into_tensor"] * 5
    assert in_flight(module.graph) == 5 * SIZE


@pytest.mark.parametrize("num", [1, 2, 3])
def test_the_bound_holds_and_the_next_one_is_always_on_its_way(num):
    run = functools.partial(overlap, max_in_flight_bytes=num * SIZE)
    module = check_same(capture(layers, *layer_args()), layer_args(), run)
    assert in_flight(module.graph) == num * SIZE
    order = ops(module.graph)
    started = waited = 0
    for op in order:
        started += op == "all_gather_into_tensor"
        waited += op == "wait_tensor"
        if op == "mm":
            assert started == min(5, waited + num), order


def test_a_bound_below_one_collective_lets_one_pass():
    run = functools.partial(overlap, max_in_flight_bytes=1)
    module = check_same(capture(layers, *layer_args()), layer_args(), run)
    assert in_flight(module.graph) == SIZE


def test_what_is_needed_first_goes_first():
    def fn(x: Tensor, *shards: Tensor) -> Tensor:
        started = [gather(shard) for shard in shards]
        for one in reversed(started):
            x = torch.relu(x @ wait(one))
        return x

    args = (integers(2, 4), *(integers(4, 4) for _ in range(4)))
    run = functools.partial(overlap, max_in_flight_bytes=2 * SIZE)
    module = check_same(capture(fn, *args), args, run)
    sent = [node.args[0].name for node in module.graph.nodes if "all_gather" in str(node.target)]
    assert sent == ["arg4_1", "arg3_1", "arg2_1", "arg1_1"]


def test_reductions_start_on_time_and_old_ones_make_room():
    """Their results are needed only in the end: the oldest is waited for when there is no room."""

    def fn(x: Tensor, *weights: Tensor) -> list[Tensor]:
        reduced = []
        for weight in weights:
            x = torch.relu(x @ weight)
            reduced.append(scatter(x * 2))
        return [wait(one) + 1 for one in reduced]

    args = (integers(4, 4), *(integers(4, 4).sign() for _ in range(5)))
    run = functools.partial(overlap, max_in_flight_bytes=2 * SIZE)
    module = check_same(capture(fn, *args), args, run)
    assert in_flight(module.graph) == 2 * SIZE
    order = ops(module.graph)
    places = [i for i, op in enumerate(order) if op == "reduce_scatter_tensor"]
    muls = [i for i, op in enumerate(order) if op == "mul"]
    assert all(0 < place - mul <= 2 for place, mul in zip(places, muls, strict=True)), order
    assert order[: places[2]].count("wait_tensor") == 1


def test_waits_stand_after_the_last_independent_compute():
    def fn(x: Tensor, y: Tensor) -> Tensor:
        reduced = wait(all_reduce(x))
        for _ in range(4):
            y = torch.relu(y @ y)
        return reduced + y

    args = integers(2, 2), integers(2, 2).sign()
    for run in (overlap, delay_waits):
        module = check_same(capture(fn, *args), args, run)
        assert ops(module.graph)[0] == "all_reduce"
        assert ops(module.graph)[-2:] == ["wait_tensor", "add"]


def test_a_wait_stays_before_memory_is_used_again():
    """The gather reads its input until the wait; the result of the wait is used much later."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        gathered = wait(gather(x))
        z = torch.relu(y)
        x.copy_(z)
        return torch.relu(z) + gathered

    args = integers(4), integers(4)
    for run in (overlap, delay_waits):
        order = ops(check_same(capture(fn, *args), args, run).graph)
        assert order.index("wait_tensor") == order.index("copy_") - 1


def test_results_in_place_are_read_through_other_names():
    def fn(x: Tensor) -> Tensor:
        y = x + 1
        view = y.view(-1)
        wait(comm.all_reduce_(y, "sum", name()))
        z = torch.relu(x)
        return view * z.view(-1)

    args = (integers(2, 2),)
    for run in (overlap, delay_waits):
        order = ops(check_same(capture(fn, *args), args, run).graph)
        assert order.index("wait_tensor") < order.index("mul")
        assert order.index("relu") < order.index("wait_tensor")


def test_a_read_before_a_reduction_in_place_stays_before_it():
    def fn(x: Tensor, y: Tensor) -> Tensor:
        z = x + 1
        before = torch.relu(torch.relu(y)) * z.view(-1)
        wait(comm.all_reduce_(z, "max", name()))
        z.neg_()
        return before + z.view(-1)

    args = integers(4), integers(4)
    order = ops(check_same(capture(fn, *args), args, overlap).graph)
    assert order.index("mul") < order.index("all_reduce_")


def test_random_numbers_keep_their_order():
    def fn(x: Tensor) -> list[Tensor]:
        first = torch.randint_like(x, 8)
        reduced = wait(all_reduce(first))
        second = torch.randint_like(x, 8)
        return [reduced, wait(gather(second)), torch.randint_like(x, 8)]

    for run in (overlap, delay_waits):
        check_same(capture(fn, integers(16)), (integers(16),), run)


def test_inputs_stay_in_front():
    module = check_same(capture(layers, *layer_args()), layer_args(), overlap)
    kinds = [node.op for node in module.graph.nodes]
    assert kinds == sorted(kinds, key=["placeholder", "call_function", "output"].index)


@pytest.mark.parametrize("num", [1, 2, 3])
def test_weights_that_are_read_count_as_gathered(num):
    """The next gather takes the place of the weight that was read for the last time."""
    run = functools.partial(overlap, max_gathered_bytes=num * SIZE)
    module = check_same(capture(layers, *layer_args()), layer_args(), run)
    order = ops(module.graph)
    products = [place for place, op in enumerate(order) if op == "mm"]
    started = [order[:place].count("all_gather_into_tensor") for place in products]
    assert started == [min(5, place + num) for place in range(5)], order


def test_a_weight_counts_until_the_kernel_has_run_that_reads_it_last():
    """A compiler fuses the bias into the cheap work after the product that follows it."""

    def fn(x: Tensor, *shards: Tensor) -> Tensor:
        for shard in shards:
            full = wait(gather(shard))
            scaled = full * 2
            x = torch.relu(x @ x) + scaled
        return x

    args = (integers(4, 4), *(integers(4, 4) for _ in range(3)))
    run = functools.partial(overlap, max_gathered_bytes=SIZE)
    order = ops(check_same(capture(fn, *args), args, run).graph)
    adds = [place for place, op in enumerate(order) if op == "add"]
    gathers = [place for place, op in enumerate(order) if op == "all_gather_into_tensor"]
    assert gathers[0] < adds[0] < gathers[1] < adds[1] < gathers[2], order


def test_what_is_read_in_the_beginning_and_the_end_does_not_count():
    def fn(x: Tensor, root: Tensor, *shards: Tensor) -> Tensor:
        full = wait(gather(root))
        return layers(x @ full, *shards) @ full

    args = (integers(2, 4), integers(4, 4), *layer_args()[1:])
    run = functools.partial(overlap, max_gathered_bytes=2 * SIZE)
    order = ops(check_same(capture(fn, *args), args, run).graph)
    products = [place for place, op in enumerate(order) if op == "mm"]
    started = [order[:place].count("all_gather_into_tensor") for place in products]
    assert started == [3, 3, 4, 5, 6, 6, 6], order


def backward(x: Tensor, *shards: Tensor) -> list[Tensor]:
    """Each layer gathers its weight, and reduces the gradients that its end has."""
    reduced = []
    for shard in shards:
        first = x @ wait(gather(shard))
        second = first @ first
        reduced.append(scatter(lay_in_row([first, second], torch.float64)))
        x = second.sign()
    return [wait(one) + 1 for one in reduced]


ROW = 4 * SIZE
"""Bytes of what a layer reduces."""


def test_memory_of_a_row_is_there_for_the_next():
    """A reduction that has no room is waited for before gradients are laid in another row."""
    args = (integers(4, 4), *layer_args()[1:])
    args = (args[0], *(one.float() for one in args[1:]))
    run = functools.partial(overlap, max_gathered_bytes=2 * SIZE, max_reduced_bytes=ROW)
    module = check_same(capture(backward, *args), args, run)
    order = ops(module.graph)
    rows = [place for place, op in enumerate(order) if op == "lay_in_row"]
    before = [order[place - 1] == "wait_tensor" for place in rows]
    assert before == [False, True, True, True, False], "by the last one all else is freed"
    assert [order[place + 1] for place in rows] == ["reduce_scatter_tensor"] * 5, order


def test_gathers_do_not_make_room_for_reductions():
    """They go first, and are waited for where their results are read."""
    args = (integers(4, 4), *(one.float() for one in layer_args()[1:]))
    run = functools.partial(overlap, max_gathered_bytes=2 * SIZE, max_reduced_bytes=ROW)
    graph = check_same(capture(backward, *args), args, run).graph
    place = {node: at for at, node in enumerate(graph.nodes)}
    gathers = [node for node in graph.nodes if "all_gather" in str(node.target)]
    reductions = [node for node in graph.nodes if "reduce_scatter" in str(node.target)]
    products = [at for node, at in place.items() if "mm" in str(node.target)]
    for gathered in gathers:
        (waited,) = gathered.users
        first = min(place[user] for user in waited.users)
        assert not any(place[waited] < at < first for at in products), graph
    for reduced, following in zip(reductions, gathers[2:], strict=False):
        assert place[following] < place[reduced], graph


@pytest.mark.parametrize("bound", ["in_flight", "gathered", "reduced"])
def test_bounds_are_checked(bound):
    graph = capture(layers, *layer_args()).graph
    with pytest.raises(UsageError, match=f"above 0 bytes, got -1: {bound}"):
        overlap(graph, **{f"max_{bound}_bytes": -1})
