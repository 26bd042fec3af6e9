"""What is alive in a graph, node by node."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.profiler import ProfilerActivity, profile

from comm_graphs import capture, gather, integers, ops, scatter, wait
from shoal.compile.lowering.gathered_rows import lay_in_row
from shoal.compile.passes.memory import Use
from shoal.passes import memory_of, overlap

SIZE = 64
"""Bytes of a matrix of 4 × 4."""


def matrices(num: int) -> tuple[Tensor, ...]:
    return tuple(integers(4, 4) for _ in range(num))


def peak_when_run(module: fx.GraphModule, args: tuple[Tensor, ...]) -> int:
    """The most that was allocated while a graph ran, as the profiler saw it."""
    module.recompile()
    run = fx.Interpreter(module)
    run.run(*args)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run.run(*args)
    alive = peak = 0
    for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


def test_the_peak_is_that_of_a_run() -> None:
    """Views take nothing, a matrix lives until its last reader, results stay."""

    def fn(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        first = (x @ weight).t()
        both = torch.cat([first, first @ weight])
        top, bottom = both.split(256)
        return top.t() @ bottom, torch.relu(first).sum(0)

    args = torch.ones(256, 256), torch.ones(256, 256)
    module = capture(fn, *args)
    assert memory_of(module.graph).peak_bytes == peak_when_run(module, args)


def test_each_node_says_what_is_alive_while_it_runs() -> None:
    graph = capture(lambda x, w: x @ w @ w @ w, *matrices(2)).graph
    memory = memory_of(graph)
    assert [memory.total[node.name] for node in graph.find_nodes(op="placeholder")] == [0, 0]
    sizes = [size for name, size in memory.total.items() if name.startswith("mm")]
    assert sizes == [SIZE, 2 * SIZE, 2 * SIZE]
    assert (memory.at, memory.peak_bytes) == ("mm_1", 2 * SIZE)
    assert memory.peak == {Use.OTHER: 2 * SIZE}
    assert str(memory) == "estimated: at most 0.0 MiB, at mm_1: 0.0 other"


def test_a_graph_that_takes_nothing() -> None:
    memory = memory_of(capture(lambda x: x.t(), *matrices(1)).graph)
    assert (memory.peak_bytes, memory.peak, memory.most(Use.OTHER)) == (0, {}, 0)


def test_inputs_count_only_if_they_are_given_away() -> None:
    graph = capture(lambda x, w: torch.relu(x @ w) @ w, *matrices(2)).graph
    name = graph.find_nodes(op="placeholder")[0].name
    memory = memory_of(graph, [name])
    assert list(memory.total.values()) == [SIZE, SIZE, 2 * SIZE, 2 * SIZE, 2 * SIZE, SIZE]
    assert memory.peak == {Use.GIVEN: SIZE, Use.OTHER: SIZE}


def test_what_is_sent_lives_until_the_wait() -> None:
    """Under a cast of its own; and what arrives lives from the start."""

    def fn(shard: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        full = gather(shard.double())
        y = torch.relu(x)
        z = y @ wait(full).float()
        return z, wait(scatter(lay_in_row([z, y], torch.float64)))

    args = (integers(4, 4), integers(4, 4))
    graph = capture(fn, *args).graph
    memory = memory_of(graph)
    by_op = dict(zip(ops(graph), list(memory.total.values())[2:], strict=False))
    assert by_op["all_gather_into_tensor"] == 4 * SIZE
    assert by_op["relu"] == 5 * SIZE
    assert by_op["mm"] == 3 * SIZE
    assert by_op["lay_in_row"] == 6 * SIZE
    assert memory.peak == {
        Use.SENT: 4 * SIZE,
        Use.REDUCED: 4 * SIZE,
        Use.RETURNED: SIZE,
    }


def test_what_is_fused_takes_nothing_and_reads_late() -> None:
    """The kernel of `relu` reads the product; it runs where its result is read."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        half = (x @ w) * 0.5
        other = w @ w
        return torch.relu(half) + other.sum()

    graph = capture(fn, *matrices(2)).graph
    apart, fused = memory_of(graph), memory_of(graph, fuses=True)
    mul = graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)[0]
    assert apart.total[mul.name] == 2 * SIZE
    assert fused.total[mul.name] == SIZE
    assert fused.total["mm_1"] == 2 * SIZE, "the product is not read before the sum is there"


def test_bounds_lower_the_peak() -> None:
    def fn(x: Tensor, *shards: Tensor) -> Tensor:
        for shard in shards:
            x = torch.relu(x @ wait(gather(shard)))
        return x

    args = matrices(7)
    early, bounded = capture(fn, *args).graph, capture(fn, *args).graph
    overlap(early)
    overlap(bounded, max_gathered_bytes=2 * SIZE)
    assert memory_of(early).most(Use.GATHERED) == 6 * SIZE
    assert memory_of(bounded).most(Use.GATHERED) == 2 * SIZE
