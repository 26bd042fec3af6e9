"""Hooks on tensors, modules and saved tensors around a compiled program fire as in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compile_compare import BACKEND, ENTRIES, Entry, Given, compare, compiled, leaf


def program(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sin() * x
    return y, y * 2


def hooked_input() -> Given:
    (x,) = leaf()
    seen = torch.zeros(())
    x.register_hook(lambda grad: seen.add_(grad.sum()) and grad * 2)
    return Given(args=(x,), watched={"seen": seen})


@pytest.mark.parametrize("through", ENTRIES)
def test_hook_on_an_input(through: Entry) -> None:
    compare(program, hooked_input, through=through, scenarios=("train",))


@pytest.mark.parametrize("through", ENTRIES)
def test_hook_after_accumulation(through: Entry) -> None:
    def inputs() -> Given:
        (x,) = leaf()
        seen = torch.zeros(4, 6)

        def take(tensor: Tensor) -> None:
            assert tensor.grad is not None
            seen.add_(tensor.grad)
            tensor.grad = None

        x.register_post_accumulate_grad_hook(take)
        return Given(args=(x,), watched={"seen": seen})

    compare(program, inputs, through=through, scenarios=("train",), steps=2)


@pytest.mark.parametrize("through", ENTRIES)
def test_hook_on_an_output(through: Entry) -> None:
    def backward(outputs: tuple[Tensor, Tensor], given: Given) -> None:
        outputs[0].register_hook(lambda grad: grad * 3)
        outputs[0].retain_grad()
        (outputs[0].sum() + outputs[1].sum()).backward()
        kept = outputs[0].grad
        assert kept is not None
        given.args[0].grad.add_(kept)

    # Between graph outputs there is no edge: what passes through the second output does not meet
    # the hook of the first. So only a program with one output is comparable.
    def single(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin() * x, x * 2

    compare(single, leaf, through=through, backward=backward, scenarios=("train",))


class Doubling(torch.autograd.graph.saved_tensors_hooks):
    """Pack as a pair, unpack the first: numbers stay, and the calls are counted."""

    def __init__(self, count: list[int]) -> None:
        def pack(tensor: Tensor) -> tuple[Tensor, int]:
            count[0] += 1
            return tensor.clone(), 1

        def unpack(packed: tuple[Tensor, int]) -> Tensor:
            count[1] += 1
            return packed[0]

        super().__init__(pack, unpack)


@pytest.mark.parametrize("through", ENTRIES)
def test_saved_tensor_hooks_around_the_call(through: Entry) -> None:
    """Numbers are right under hooks, and both ends run equally often."""
    call = compiled(program, backend=BACKEND, through=through)
    (x,) = leaf()
    call(x)
    count = [0, 0]
    with Doubling(count):
        outputs = call(x)
    outputs[0].sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad(program(x)[0].sum(), x)[0])
    assert count[0] == count[1]


def test_compiled_under_saved_tensor_hooks() -> None:
    """They see what runs, and nothing of what is traced."""
    call = compiled(program, backend=BACKEND, through="compile")
    (x,) = leaf()
    grads: list[Tensor] = []
    counts: list[int] = []
    for _ in range(2):
        seen: list[Tensor] = []

        def twice(tensor: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(tensor)
            return tensor * 2

        with torch.autograd.graph.saved_tensors_hooks(twice, lambda tensor: tensor):
            outputs = call(x)
        grads += torch.autograd.grad(outputs[0].sum(), x)
        counts.append(len(seen))
    assert counts[0] == counts[1] > 0
    assert torch.equal(*grads)


def test_save_on_cpu_around_training() -> None:
    def inner(x: Tensor) -> tuple[Tensor, Tensor]:
        return program(x)

    call = compiled(inner, backend=BACKEND, through="compile")
    (x,) = leaf()
    with torch.autograd.graph.save_on_cpu():
        got = torch.autograd.grad(call(x)[0].sum(), x)[0]
    assert torch.equal(got, torch.autograd.grad(program(x)[0].sum(), x)[0])


def test_module_hooks_inside_the_graph() -> None:
    def run(module: nn.Module, x: Tensor) -> Any:
        return module(x)

    def plus_one(module: nn.Module, args: Any, out: Any) -> Any:
        return out + 1

    def inputs() -> tuple[nn.Module, Tensor]:
        module = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        module[0].register_forward_pre_hook(lambda mod, args: (args[0] * 2,))
        module[0].register_forward_hook(plus_one)
        return module, torch.randn(4, 6)

    compare(run, inputs)


def test_hook_inside_the_graph() -> None:
    """A hook on an intermediate is traced, run by compiled autograd, or refused by name."""

    def hooked(x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(lambda grad: grad * 3)
        return y.sin()

    compare(hooked, leaf, fullgraph=False, scenarios=("train",), may_refuse="hook")
