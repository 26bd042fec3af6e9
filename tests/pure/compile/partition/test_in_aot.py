"""Joint graphs as torch's own ahead-of-time runtime captures them, run by it in our two parts."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_function, make_boxed_func

from shoal.compile.partition.partitioners import (
    default_partition,
    min_cut_rematerialization_partition,
)

PARTITIONERS = {
    "default": default_partition,
    "min cut": min_cut_rematerialization_partition,
    "short of memory": functools.partial(min_cut_rematerialization_partition, memory_budget=0.3),
    "least": functools.partial(min_cut_rematerialization_partition, memory_budget=0.0),
}


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def phases_from_tags(partitioner, mutated_inputs=()):
    def partition(joint, inputs, *, num_fwd_outputs, **_):
        for node in joint.graph.nodes:
            if node.op == "call_function":
                backward = "backward" in node.meta.get("partitioner_tag", "is_forward")
                node.meta["phase"] = "backward" if backward else "forward"
        return partitioner(
            joint, inputs, num_fwd_outputs=num_fwd_outputs, mutated_inputs=mutated_inputs
        )

    return partition


def tensors(results) -> list[Tensor]:
    listed = list(results) if isinstance(results, list | tuple) else [results]
    return [one for one in listed if isinstance(one, Tensor)]


def run(function, inputs) -> list[Tensor]:
    torch.manual_seed(0)
    results = tensors(function(*inputs))
    sum(one.sum() for one in results if one.requires_grad).backward()
    return [*results, *inputs, *(one.grad for one in inputs if one.grad is not None)]


def assert_as_eager(function, inputs, partitioner, *, mutated=(), dynamic=False):
    """Run compiled and not; returns the numbers of inputs and outputs of both graphs."""
    counts = []

    def count(module: fx.GraphModule, _):
        output = next(iter(reversed(module.graph.nodes)))
        counts.append((len(module.graph.find_nodes(op="placeholder")), len(output.args[0])))
        return make_boxed_func(module)

    copies = [
        [one.detach().clone().requires_grad_(one.requires_grad) for one in inputs] for _ in "12"
    ]
    compiled = aot_function(
        function,
        count,
        count,
        partition_fn=phases_from_tags(partitioner, mutated),
        dynamic=dynamic,
    )
    for got, expected in zip(run(compiled, copies[0]), run(function, copies[1]), strict=True):
        assert torch.equal(got, expected)
    return counts


def batch_norm(x, weight, bias, mean, variance):
    return torch.nn.functional.batch_norm(x, mean, variance, weight, bias, training=True).relu()


def dropped(x, y):
    return torch.nn.functional.dropout((x @ y).sin(), 0.4) @ y, x.detach() + 1


def viewed(x, y):
    parts = (x @ y).view(2, 2, 4).unbind(0)
    return parts[0].t().contiguous().tanh() * parts[1].t(), y.t().sigmoid().sum(0)


@pytest.mark.parametrize("name", PARTITIONERS)
@pytest.mark.parametrize("function", [dropped, viewed])
def test_functions(name, function):
    assert_as_eager(function, [leaf(4, 4), leaf(4, 4)], PARTITIONERS[name])


@pytest.mark.parametrize("name", PARTITIONERS)
def test_buffers_that_the_runtime_writes_to_after_forward(name):
    inputs = [leaf(4, 3, 5, 5), leaf(3), leaf(3), torch.zeros(3), torch.ones(3)]
    assert_as_eager(batch_norm, inputs, PARTITIONERS[name], mutated=(3, 4))


def shapes_among_results(a, b, c, d):
    rows, columns = b.size()
    whole = torch.cat([a.expand((rows + c.size(0), a.size(0))), b, c])
    product = torch.mm(whole, d)
    again = torch.mm(product, a.view(product.size(1), a.size(0)))
    return whole, rows, columns, c, again


@pytest.mark.parametrize(
    ("name", "counts"), [("default", [(4, 13), (10, 4)]), ("min cut", [(4, 12), (9, 4)])]
)
def test_as_many_sizes_cross_as_with_torch(name, counts):
    inputs = [leaf(10), leaf(3, 10), leaf(2, 10), leaf(10, 1)]
    found = assert_as_eager(shapes_among_results, inputs, PARTITIONERS[name], dynamic=True)
    assert found == counts
