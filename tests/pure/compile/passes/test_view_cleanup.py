"""Views that show nothing new go; everything else stays."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from comm_graphs import capture, check_same
from shoal.compile.passes.view_cleanup import drop_idle_views

aten = torch.ops.aten


def calls_after(fn, *args: Tensor) -> Counter:
    module = check_same(capture(fn, *args), args, drop_idle_views)
    return Counter(node.target for node in module.graph.nodes if node.op == "call_function")


def test_views_that_undo_each_other() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return x @ w.t().t().view(4, 4) + x.view(2, 2, 4).view(4, 4)

    calls = calls_after(fn, torch.randn(4, 4), torch.randn(4, 4))
    assert calls == {aten.mm.default: 1, aten.add.Tensor: 1}


def test_views_that_show_something_else_stay() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.t() @ x.view(2, 8).t().reshape(4, 4)

    calls = calls_after(fn, torch.randn(4, 4))
    assert calls[aten.t.default] == 2
    assert calls[aten.mm.default] == 1


def test_a_copy_is_not_looked_through() -> None:
    """What was copied before a write keeps the old bytes, though it looks the same."""

    def fn(x: Tensor) -> Tensor:
        old = x.t().clone().t()
        x.add_(1)
        return old * 2 + x.view(4, 4)

    calls_after(fn, torch.randn(4, 4))


def test_what_is_returned_stays_a_view() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.view(4, 4)

    assert calls_after(fn, torch.randn(4, 4)) == {aten.view.default: 1}


def test_a_sum_drops_its_dimensions_itself() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        kept = y.sum(0, keepdim=True)
        return x.sum([0, -1], keepdim=True).view(3), kept.view(12), kept.view(3, 4) + 1

    calls = calls_after(fn, torch.randn(2, 3, 4), torch.randn(2, 3, 4))
    assert calls[aten.view.default] == 2, "another shape, and a sum that is seen as it is too"


def test_a_number_is_no_memory_to_look_at() -> None:
    graph = fx.Graph()
    node = graph.call_function(aten.to.dtype, (2, torch.float32))
    with FakeTensorMode():
        node.meta["val"] = torch.tensor(2.0)
    graph.output((graph.call_function(aten.neg.default, (node,)),))
    assert drop_idle_views(graph) == 0
