"""Graphs that are read by others: `aot_export_joint_simple`, and what nodes say of themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from shoal.aot import (
    aot_export_joint_simple,
    aot_function,
    default_partition,
    min_cut_rematerialization_partition,
    nop,
)


def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    z = x.clone()
    z.mul_(y)  # not an argument
    return z.sin(), y * y.detach()


def leaves() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, requires_grad=True) for _ in range(2)]


def test_an_inference_graph_is_called_as_the_function() -> None:
    x, y = leaves()
    graph = aot_export_joint_simple(program, [x, y], trace_joint=False)
    results = graph(x, y)
    assert isinstance(results, tuple)
    for a, b in zip(results, program(x, y), strict=True):
        assert torch.equal(a, b)
    assert len(graph.graph.find_nodes(op="placeholder")) == 2


def test_a_joint_graph_is_cut_into_forward_and_backward() -> None:
    x, y = leaves()
    joint = aot_export_joint_simple(program, [x, y], trace_joint=True)
    forward, backward = default_partition(joint, [x, y], num_fwd_outputs=2)
    expected = program(x, y)
    results = forward(x, y)
    for a, b in zip(results, expected, strict=False):
        assert torch.equal(a, b)
    tangents = [torch.ones_like(one) for one in expected]
    wanted = torch.autograd.grad(expected, [x, y], tangents)
    for a, b in zip(backward(*results[2:], *tangents), wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_one_tensor_twice_is_two_inputs() -> None:
    x, _ = leaves()
    graph = aot_export_joint_simple(lambda a, b: (a + b,), [x, x], trace_joint=False)
    assert torch.equal(graph(x, 2 * x)[0], 3 * x)


def reshapes(p: Tensor, x: Tensor) -> tuple[Tensor]:
    x.t_()
    return (p + x,)


def writes(p: Tensor, x: Tensor) -> tuple[Tensor]:
    x.mul_(2)
    return (p + x,)


def writes_parameter(p: Tensor, x: Tensor) -> tuple[Tensor]:
    p.mul_(2)
    return (p + x,)


def views(p: Tensor, x: Tensor) -> tuple[Tensor]:
    return (x.view(-1),)


def nested(p: Tensor, x: Tensor) -> tuple[Any, ...]:
    return ((p + x,),)


def single(p: Tensor, x: Tensor) -> Any:
    return p + x


REFUSED: list[tuple[Callable[..., Any], str]] = [
    (reshapes, "received a metadata mutation"),
    (writes, "does not support input mutations"),
    (writes_parameter, "mutation"),
    (views, "outputs that alias inputs"),
    (nested, "individual outputs not to be pytrees"),
    (single, "outputs to be a single list/tuple"),
]


@pytest.mark.parametrize("trace_joint", [False, True])
@pytest.mark.parametrize(("func", "message"), REFUSED, ids=lambda one: getattr(one, "__name__", ""))
def test_another_calling_convention_is_refused(
    func: Callable[..., Any], message: str, trace_joint: bool
) -> None:
    args = [nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)]
    with pytest.raises(RuntimeError, match=message):
        aot_export_joint_simple(func, args, trace_joint=trace_joint)
    assert torch.equal(args[1], torch.ones(2, 2))


def check_refused(args: Sequence[Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        aot_export_joint_simple(lambda x, y: (x.mul_(2) + y,), args, trace_joint=False)


def test_arguments_that_are_refused() -> None:
    x = torch.ones(4)
    check_refused([x, x], "duplicated inputs that are mutated")
    check_refused([x, x.view(-1)], "aliased inputs that are mutated")
    check_refused([[x, x], x], "individual inputs not to be pytrees")
    with pytest.raises(NotImplementedError, match=r"got 3 as argument 1"):
        aot_export_joint_simple(program, [x, 3], trace_joint=False)
    with patch("torch._functorch.config.functionalize_rng_ops", True):
        check_refused([x, x], "Functionalized RNG")


@pytest.mark.parametrize("partition", [default_partition, min_cut_rematerialization_partition])
def test_what_readers_of_torchs_graphs_look_for(partition: Any) -> None:
    """Nodes of backward say so, and the function is counted among those compiled."""
    graphs: list[Any] = []

    def keep(module: Any, _: Any) -> Any:
        graphs.append(module)
        return module

    counters["aot_autograd"].clear()
    x = torch.ones(3, requires_grad=True)
    aot_function(lambda x: x.sin().cos().sum(), nop, keep, partition)(x).backward()
    calls = [node for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert calls
    assert all(node.meta["autograd_backward"] for node in calls)
    assert counters["aot_autograd"] == {"total": 1, "ok": 1}
