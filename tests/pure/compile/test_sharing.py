"""A graph that writes to an argument holds for one way of sharing memory; others are right too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx import GraphModule

from compile_compare import ENTRIES, Entry, Given, compare, compiled
from shoal.aot import aot_function, aot_module_simplified, nop

OFFSETS = (None, 3, 4, 6, 10)
"""Where the second argument begins in the memory of the first; None for memory of its own."""


def written(x: Tensor, y: Tensor) -> tuple[Tensor]:
    x.add_(1)
    y.mul_(2)
    return (x + y.sum(),)


class Written(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
        return written(x, y)


def arguments(offset: int | None) -> tuple[Tensor, Tensor]:
    memory = torch.arange(24.0)
    second = torch.arange(6.0) if offset is None else memory[offset : offset + 6]
    return memory[:6], second


def check(call: Callable[..., Any], offset: int | None) -> None:
    want, got = arguments(offset), arguments(offset)
    assert torch.equal(call(*got)[0], written(*want)[0])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("first", [None, 3, 6])
@pytest.mark.parametrize("through", ENTRIES)
def test_sharing_may_change_between_calls(through: Entry, first: int | None) -> None:
    call = compiled(written, backend="shoal", through=through)
    for offset in (first, *OFFSETS, first):
        check(call, offset)


def test_sharing_may_change_for_a_simplified_module() -> None:
    call = aot_module_simplified(Written(), arguments(3), nop)
    for offset in OFFSETS:
        check(call, offset)


def test_nothing_is_compared_where_nothing_is_written() -> None:
    """Readers do not pay: the generated function is what is called."""

    class Reads(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
            return (x + y,)

    for module, is_compared in ((Reads(), False), (Written(), True)):
        call = aot_module_simplified(module, arguments(3), nop)
        (inner,) = [c.cell_contents for c in call.__closure__ if callable(c.cell_contents)]  # type: ignore[attr-defined]
        assert hasattr(inner, "source") is not is_compared


def receives(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    x.add_(y * 2)
    return z * 1


def whole_and_view() -> Given:
    x = torch.randn(3, 4)
    return Given(args=(x, torch.randn(3, 4, requires_grad=True), x[1:]))


def two_views() -> Given:
    memory = torch.randn(3, 8)
    y = torch.randn(3, 4, requires_grad=True)
    return Given(args=(memory[:, :4], y, memory[:, 2:4]), watched={"memory": memory})


@pytest.mark.parametrize("make", [whole_and_view, two_views])
def test_history_reaches_all_that_share(make: Callable[[], Given]) -> None:
    """None of them requires a gradient until one is written to with something that does.

    Dynamo itself does not read such a program.
    """
    compare(receives, make, through="aot", scenarios=("train",))


def test_history_that_cannot_reach_all_is_refused() -> None:
    memory, y = torch.randn(3, 4), torch.randn(3, 4, requires_grad=True)
    with pytest.raises(NotImplementedError, match="share memory"):
        aot_function(receives, nop)(memory.detach(), y, memory.detach()[1:])


def test_leaf_that_is_a_view_of_plain_memory_is_refused() -> None:
    """Its base requires no gradient, so that nothing would come back through it."""
    memory = torch.randn(3, 4)
    leaf = memory[1:].requires_grad_()

    def program(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    with pytest.raises(NotImplementedError, match="share memory"):
        aot_function(program, nop)(memory, leaf)


def forward_graph(x: Tensor, y: Tensor, **kwargs: Any) -> GraphModule:
    graphs: list[GraphModule] = []

    def keep(module: GraphModule, inputs: list[Any]) -> GraphModule:
        graphs.append(module)
        return module

    aot_function(written, keep, **kwargs)(x, y)
    return graphs[0]


@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_parts_of_one_memory_that_do_not_meet_stay_apart(cut: str) -> None:
    """No write to all of it for a write to a part."""

    def parts() -> tuple[Tensor, Tensor]:
        memory = torch.arange(32.0).view(4, 8)
        return (memory[:2], memory[2:]) if cut == "rows" else (memory[:, :4], memory[:, 4:])

    graph = forward_graph(*parts()).graph
    targets = {node.target for node in graph.nodes}
    assert torch.ops.aten.as_strided.default not in targets
    assert torch.ops.aten.as_strided_scatter.default not in targets
    assert len(graph.find_nodes(op="placeholder")) == 2
    compare(written, lambda: Given(args=parts()), through="aot")


@pytest.mark.parametrize("start", [2, 6])
@pytest.mark.parametrize("through", ENTRIES)
def test_parts_of_another_size_may_meet(through: Entry, start: int) -> None:
    """A graph for any size holds for one where several lie in one memory."""

    def program(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y.mul_(2).sum()

    if through == "aot":
        call = aot_function(program, nop, dynamic=True)
    else:
        torch._dynamo.reset()
        call = torch.compile(program, backend="shoal", dynamic=True)
    for end in (4, 6, 9, 5, 4):
        want, got = torch.arange(24.0), torch.arange(24.0)
        second = slice(start, start + 6)
        assert torch.equal(call(got[:end], got[second]), program(want[:end], want[second]))
        assert torch.equal(got, want)


def test_dynamo_compiles_anew_for_other_overlaps() -> None:
    """What its guards can tell apart is compiled, and not left to the program itself."""
    torch._dynamo.reset()
    graphs = counters["stats"]["unique_graphs"]
    call = torch.compile(written, backend="shoal", dynamic=False)
    for offset in (3, 6, 3, 6):
        check(call, offset)
    assert counters["stats"]["unique_graphs"] == graphs + 2


def diagonal_filled(x: Tensor) -> Tensor:
    x.fill_diagonal_(3.0)
    return x * 2


def read_by_strides(x: Tensor) -> Tensor:
    return x.as_strided((2, 2), (5, 1), 0) * 2


def shown_by_strides(x: Tensor) -> Tensor:
    return x.as_strided((2, 2), (5, 1), 0)


@pytest.mark.parametrize("fn", [diagonal_filled, read_by_strides, shown_by_strides])
def test_what_counts_from_where_memory_begins_holds_for_one_beginning(fn: Any) -> None:
    """Neither Dynamo nor a graph asks where an argument begins in its memory."""
    torch._dynamo.reset()
    call = torch.compile(fn, backend="shoal")
    for skipped in (0, 2, 0):
        found, expected = (torch.arange(24.0).view(6, 4)[skipped : skipped + 4] for _ in range(2))
        assert torch.equal(call(found), fn(expected))
        assert torch.equal(found, expected)
