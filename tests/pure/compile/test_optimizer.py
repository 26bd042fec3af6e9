"""Optimizer steps inside a graph, whose state is not among the arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compile_compare import BACKEND

STEPS = 3


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, foreach=True)


def trained(make: Callable[[Any], torch.optim.Optimizer], wrap: Callable[[Any], Any]) -> Any:
    """Weights and optimizer state after some steps, with `wrap` around the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = make(model.parameters())
    step = wrap(lambda: optimizer.step())
    for _ in range(STEPS):
        model(torch.randn(4, 6)).square().sum().backward()
        step()
        optimizer.zero_grad()
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return [*model.parameters(), *state]


@pytest.mark.parametrize("make", [sgd, adamw])
def test_step(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    want = trained(make, lambda step: step)
    got = trained(make, lambda step: torch.compile(step, backend=BACKEND))
    assert len(want) == len(got)
    for left, right in zip(want, got, strict=True):
        torch.testing.assert_close(right, left)


@pytest.mark.parametrize("make", [sgd, adamw])
def test_step_is_noticed_by_a_backward_after_it(
    make: Callable[[Any], torch.optim.Optimizer],
) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = make([weight])
    step = torch.compile(lambda: optimizer.step(), backend=BACKEND)
    weight.square().sum().backward()
    loss = weight.square().sum()
    step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tensor_of_a_closure_is_written() -> None:
    """A tensor that the program holds by itself is an input that nobody passed."""
    counts = [torch.zeros(3), torch.zeros(3)]

    def program(x: Tensor, which: Tensor) -> Tensor:
        which.add_(1)
        return x * which

    got = torch.compile(lambda x: program(x, counts[0]), backend=BACKEND, fullgraph=True)
    for _ in range(3):
        x = torch.randn(3)
        assert torch.equal(got(x), program(x, counts[1]))
    assert torch.equal(counts[0], counts[1])
