"""Functorch's smaller names: compilers, and which graph they are given."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch.fx import GraphModule

from shoal import aot


def test_all_names_are_there() -> None:
    assert sorted(aot.__all__) == list(aot.__all__)
    assert all(hasattr(aot, name) for name in aot.__all__)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_torchscript() -> None:
    def program(pair: list[Tensor]) -> dict[str, Tensor]:
        return {"sum": pair[0].sin() + pair[1], "same": pair[1]}

    pair = [torch.randn(3), torch.randn(3)]
    got, want = aot.nnc_jit(program)(pair), program(pair)
    assert torch.allclose(got["sum"], want["sum"])
    assert got["same"] is pair[1]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_memory_efficient_fusion() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.BatchNorm1d(4), nn.Hardtanh())
    same, x = copy.deepcopy(module), torch.randn(5, 4)
    fused = aot.memory_efficient_fusion(same)
    for call in (module, fused):
        call(x).pow(2).sum().backward()
    for (name, want), got in zip(module.named_parameters(), same.parameters(), strict=True):
        assert torch.allclose(want.grad, got.grad, atol=1e-6), name  # type: ignore[arg-type]
    for want, got in zip(module.buffers(), same.buffers(), strict=True):
        assert torch.allclose(want, got)
    function = aot.memory_efficient_fusion(torch.sin, fw_compiler=aot.nop, bw_compiler=aot.nop)
    assert torch.equal(function(x), x.sin())


def test_default_decompositions_take_operators_apart() -> None:
    targets: list[Any] = []

    def keep(module: GraphModule, inputs: list[Any]) -> GraphModule:
        targets.extend(node.target for node in module.graph.nodes if node.op == "call_function")
        return module

    x = torch.randn(3, requires_grad=True)
    call = aot.aot_function(torch.tanh, keep, decompositions=aot.default_decompositions)
    call(x).sum().backward()
    assert torch.allclose(x.grad, 1 - x.tanh() ** 2)  # type: ignore[arg-type]
    assert torch.ops.aten.tanh_backward.default not in targets


def test_which_graph_is_being_compiled() -> None:
    """Forward and backward of one function have one number, and another trace sees no function."""
    seen: list[tuple[str, str]] = []

    def note(module: GraphModule, inputs: list[Any]) -> GraphModule:
        (name,), model, _ = aot.get_aot_compilation_context()
        seen.append((name, aot.get_aot_graph_name()))
        assert aot.get_aot_graph_name().startswith(f"{model}__{name}_")
        assert len(module.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default))
        return module

    inner = aot.aot_function(lambda x: x.sin().sin(), note)
    out = inner(torch.randn(5, requires_grad=True))
    plain = torch.randn(5)
    assert torch.equal(aot.aot_function(inner, note)(plain), plain.sin().sin())
    number = int(seen[0][0].split("_")[0])
    assert [name for name, _ in seen] == [f"{number}_forward", f"{number + 1}_inference"]
    seen.clear()
    with pytest.raises(AssertionError):  # backward has no sine in it: `note` looked at its graph
        out.sum().backward()
    assert [name for name, _ in seen] == [f"{number}_backward"]
    assert aot.get_aot_compilation_context()[0] == []


def test_options_that_change_nothing() -> None:
    x = torch.randn(3, requires_grad=True)
    call = aot.compiled_function(
        lambda x: x.exp().sin(),
        aot.nop,
        aot.nop,
        aot.min_cut_rematerialization_partition,
        disable_functionalization=True,
    )
    call(x).sum().backward()
    assert torch.allclose(x.grad, x.exp() * x.exp().cos())  # type: ignore[arg-type]


@pytest.mark.parametrize("tagged", [True, False])
@pytest.mark.parametrize("cut", [aot.default_partition, aot.min_cut_rematerialization_partition])
def test_partition_of_a_graph_that_torch_traced(cut: Any, tagged: bool) -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x * y).sin().exp(), y * y.detach()

    x, y = (torch.randn(2, requires_grad=True) for _ in range(2))
    joint: Any = aot_export_joint_simple(program, (x, y), trace_joint=True)
    for node in () if tagged else joint.graph.nodes:
        node.meta.pop("partitioner_tag", None)
    forward, backward = cut(joint, [x, y], num_fwd_outputs=2)
    want, got = program(x, y), forward(x, y)
    tangents = [torch.randn(2), torch.randn(2)]
    grads = torch.autograd.grad(want, [x, y], tangents)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=False))
    for a, b in zip(grads, backward(*got[2:], *tangents), strict=True):
        assert torch.allclose(a, b)
