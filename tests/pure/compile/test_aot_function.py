"""What the doors with functorch's names promise besides running a program."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import GmWrapper
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Tracer
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from shoal.aot import aot_function, aot_module, aot_module_simplified, nop


class Sum(nn.Module):
    """A flat module of two inputs."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
        return (x + y,)


def pair(*grads: bool) -> list[Tensor]:
    return [torch.randn(3, 3, requires_grad=grad) for grad in grads]


def test_gradient_that_was_not_compiled_is_refused() -> None:
    """Nobody guards a simplified module: it checks what its graph depends on."""
    call = aot_module_simplified(Sum(), pair(True, False), nop)
    call(*pair(True, False))
    with pytest.raises(AssertionError, match="input 1 would not require grad"):
        call(*pair(True, True))


def test_argument_that_came_twice_must_come_twice() -> None:
    (x,) = pair(True)
    call = aot_module_simplified(Sum(), [x, x], nop)
    call(x, x)
    with pytest.raises(AssertionError, match="input 1 would be a duplicate of input 0"):
        call(*pair(True, True))


def test_fake_arguments() -> None:
    """A graph for every first size, made without a real tensor."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    call = aot_module_simplified(Sum(), [mode.from_tensor(one) for one in pair(True, True)], nop)
    x, y = pair(True, True)
    (out,) = call(x, y)
    out.sum().backward()
    assert torch.equal(out, x + y)
    assert torch.equal(x.grad, torch.ones(3, 3))  # type: ignore[arg-type]


def test_fake_tensor_from_elsewhere_is_refused() -> None:
    mode = FakeTensorMode()
    x, hidden = (mode.from_tensor(one) for one in pair(True, False))

    class Hiding(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x + hidden,)

    with pytest.raises(AssertionError, match="Unexpected fake"):
        aot_module_simplified(Hiding(), [x], nop)


def traced(module: nn.Module) -> GraphModule:
    """A module as a graph that knows its source lines."""
    tracer = Tracer()
    tracer.record_stack_traces = True
    return GraphModule(module, tracer.trace(module))


def test_lines_of_the_program_in_both_graphs() -> None:
    class Program(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
            z = x.sin() * y
            return (z.relu(),)

    graphs: list[GraphModule] = []

    def keep(module: GraphModule, inputs: list[Any]) -> GraphModule:
        graphs.append(module)
        return module

    args = pair(True, True)
    aot_module_simplified(traced(Program()), args, keep)(*args)[0].sum().backward()
    for module in graphs:
        lines = {n.name: n.stack_trace for n in module.graph.nodes if n.op == "call_function"}
        assert all(trace and "test_aot_function.py" in trace for trace in lines.values()), lines
    assert len(graphs) == 2


def test_line_of_a_write_to_an_input() -> None:
    class Program(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            row = x[0]
            row.mul_(2)
            return (x + x,)

    def check(module: GraphModule, inputs: list[Any]) -> GraphModule:
        (copy,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        assert "row.mul_(2)" in copy.stack_trace
        return module

    aot_module_simplified(traced(Program()), pair(False), check)


def test_inference_mode() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(4, 4)
    call = aot_module(layer, fw_compiler=nop)
    with torch.inference_mode():
        assert torch.equal(call(x), layer(x))


def test_one_tensor_reshaped_under_two_names() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        x.t_()
        y.unsqueeze_(0)
        return x + y

    want = got = torch.randn(3, 4)
    want, got = want.clone(), got.clone()
    out = aot_function(program, nop)(got, got)
    assert torch.equal(out, program(want, want))
    assert got.shape == want.shape
    assert got._version == want._version


def test_argument_made_to_require_a_gradient() -> None:
    """What was computed of it before that has no gradient, what follows has one."""

    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        before = x * 5
        x.requires_grad_()
        return x * 3, y * 4, before

    (x, y), (a, b) = pair(False, True), pair(False, True)
    for call, args in ((program, (x, y)), (aot_function(program, nop), (a, b))):
        out = call(*args)
        assert [one.requires_grad for one in out] == [True, True, False]
        sum(one.sum() for one in out[:2]).backward()  # type: ignore[union-attr]
    assert a.requires_grad
    assert torch.equal(x.grad, a.grad)  # type: ignore[arg-type]
    assert torch.equal(y.grad, b.grad)  # type: ignore[arg-type]


def test_graph_is_rewritten_before_it_is_differentiated() -> None:
    def doubled(module: GraphModule, inputs: Any) -> GraphModule:
        (node,) = module.graph.find_nodes(op="call_function", target=operator.add)
        node.target = operator.mul
        module.recompile()
        return module

    x, y = pair(True, True)
    (out,) = aot_module_simplified(traced(Sum()), [x, y], nop, pre_grad_passes=doubled)(x, y)
    assert torch.equal(out, x * y)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], y)


def test_what_stands_for_lists_takes_one() -> None:
    """As Dynamo calls what it has flattened the inputs of."""
    module = GmWrapper(traced(Sum()), tuple)
    x, y = pair(True, True)
    call = aot_module_simplified(module, [x, y], nop)
    assert torch.equal(call([x, y])[0], x + y)


def test_settings_that_change_the_trace_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="ignore_shape_env"):
        aot_module_simplified(Sum(), pair(True, True), nop, ignore_shape_env=True)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compressed_tensors_are_refused(dynamic: bool) -> None:
    """To trace one with its gradient would end the process."""
    sparse = torch.eye(3).to_sparse_csr().requires_grad_()
    with pytest.raises(NotImplementedError, match="sparse_csr"):
        aot_function(torch.sparse.sampled_addmm, nop, dynamic=dynamic)(sparse, *pair(True, True))
