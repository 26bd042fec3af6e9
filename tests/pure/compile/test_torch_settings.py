"""What users set for torch's own ahead-of-time runtime, and write for its joint graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import functorch.compile as theirs
import pytest
import torch
from torch import Tensor
from torch._functorch import config
from torch.fx import GraphModule

from compile_compare import ENTRIES, Entry, compiled
from shoal.aot import aot_function, min_cut_rematerialization_partition, nop
from shoal.compile.observe import records


def program(x: Tensor, w: Tensor) -> Tensor:
    return (torch.relu(x @ w).sin() * x.shape[0]).sum(0)


def leaves() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)


def gradients(call: Callable[..., Tensor], *args: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(call(*args).sum(), args)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "partition", [theirs.default_partition, theirs.min_cut_rematerialization_partition]
)
def test_partitions_of_torch(partition: Any, dynamic: bool) -> None:
    args = leaves()
    call = aot_function(program, nop, partition_fn=partition, dynamic=dynamic)
    assert all(map(torch.equal, gradients(call, *args), gradients(program, *args)))


def test_partition_is_told_what_torch_tells() -> None:
    """Where each node ran, and the inputs: of the function, then gradients."""
    seen: list[Any] = []

    def partition(joint: GraphModule, inputs: Any, **kwargs: Any) -> Any:
        tags = {node.name: node.meta.get("partitioner_tag") for node in joint.graph.nodes}
        tags.pop("output")
        primals, tangents = inputs
        seen.append((tags, len(primals), len(tangents)))
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    args = leaves()
    gradients(aot_function(program, nop, partition_fn=partition), *args)
    ((tags, *counts),) = seen
    assert counts == [2, 1]
    assert set(tags.values()) == {"is_forward", "is_backward"}
    assert tags["tangents_1"] == "is_backward"
    assert tags["sin"] == "is_forward"


def cosines(module: GraphModule, inputs: Any) -> GraphModule:
    """A pass that puts cosines for sines, and says nothing of where they run."""
    (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    with module.graph.inserting_before(node):
        cos = module.graph.call_function(torch.ops.aten.cos.default, node.args)
    cos.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(cos)
    module.graph.erase_node(node)
    module.recompile()
    return module


@pytest.mark.parametrize("through", ENTRIES)
def test_pass_over_joint_graphs(through: Entry) -> None:
    def program(x: Tensor) -> Tensor:
        return x.sin() * 2

    call = compiled(program, backend="shoal", through=through)
    (x, _) = leaves()
    with config.patch(joint_custom_pass=cosines):
        assert torch.equal(call(x.detach()), x.sin() * 2)  # nothing is differentiated
        out = call(x)
    assert torch.equal(out, x.cos() * 2)
    out.sum().backward()
    assert torch.equal(x.grad, x.cos() * 2)  # type: ignore[arg-type]


def test_what_a_pass_made_is_not_cached() -> None:
    torch._dynamo.reset()
    (x, _) = leaves()
    with config.patch(joint_custom_pass=cosines):
        torch.compile(lambda x: x.sin() * 2, backend="shoal")(x)
    assert "joint_custom_pass" in records()[-1].cache_note


class Product(torch.autograd.Function):
    """Its backward multiplies matrices, which autocast does in a low dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return (x @ x).float() * grad


LOW = [{"device_type": "cpu", "dtype": torch.bfloat16}]


@pytest.mark.parametrize(
    ("setting", "around", "is_low"),
    [
        (None, True, False),
        ("off", True, False),
        ("same_as_forward", True, True),
        ("same_as_forward", False, False),
        (LOW, False, True),
    ],
)
def test_autocast_of_backward(setting: Any, around: bool, is_low: bool) -> None:
    """By default as in eager, outside of forward's; torch's default only if it is asked for."""
    (x, _) = leaves()
    settings = {} if setting is None else {"backward_pass_autocast": setting}
    with config.patch(settings), torch.autocast("cpu", torch.bfloat16, enabled=around):
        out = aot_function(Product.apply, nop)(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    exact, low = x @ x, (x.bfloat16() @ x.bfloat16()).float()
    assert torch.equal(grad, low if is_low else exact)


def test_memory_budget() -> None:
    """The smaller one holds: the partition's own argument, or torch's setting."""

    def chain(x: Tensor, w: Tensor) -> Tensor:
        return (((x @ w).sin() @ w).sin() @ w).sin()

    def num_saved(**settings: Any) -> int:
        graphs: list[GraphModule] = []

        def keep(module: GraphModule, inputs: list[Any]) -> GraphModule:
            graphs.append(module)
            return module

        cut = min_cut_rematerialization_partition
        with config.patch(settings):
            aot_function(chain, keep, nop, partition_fn=cut)(*leaves())
        return len(graphs[0].graph.find_nodes(op="output")[0].all_input_nodes)

    assert num_saved(activation_memory_budget=0.0) < num_saved()
