"""Parameters of a sharded model that are replaced or moved between calls of a captured graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import ranks
from shoal import fully_shard
from shoal.compile.observe import forget, records
from shoal.errors import InvariantError
from shoal.layout import Even, Flat


def set_data(module: nn.Linear, values: Tensor) -> None:
    module.weight.data = values


def replace(module: nn.Linear, values: Tensor) -> None:
    module.weight = nn.Parameter(values)


def assign(module: nn.Linear, values: Tensor) -> None:
    module.load_state_dict({**module.state_dict(), "weight": values}, assign=True)


WAYS: list[tuple[Any, Callable[[nn.Linear, Tensor], None]]] = [
    (Even(), replace),  # of a DTensor, `.data = ` sets nothing
    *((Flat(), way) for way in (set_data, assign)),
]


def build(layout: Any = None) -> tuple[Any, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], layout=layout)
    fully_shard(model, layout=layout)
    run = torch.compile(model, backend="shoal", fullgraph=True, options={"cache": False})
    return model, run


@ranks(2, timeout_s=180)
def test_the_values_of_now_are_read_whoever_put_them_there() -> None:
    """And what was taken out keeps its own: weights can be swapped for others and back."""
    x = torch.ones(2, 4)
    for layout, change in WAYS:
        model, run = build(layout)
        run(x).sum().backward()
        model.zero_grad()
        before = run(x)
        own = model[0].weight.detach()
        change(model[0], own * 2)
        assert not torch.equal(run(x), before), change
        assert torch.equal(run(x), model(x))
        run(x).square().sum().backward()
        grad = model[0].weight.grad.full_tensor()
        model.zero_grad()
        model(x).square().sum().backward()
        assert torch.equal(grad, model[0].weight.grad.full_tensor())
        change(model[0], own)
        assert torch.equal(run(x), before), change


@ranks(2, timeout_s=180)
def test_moved_shards_need_no_other_graph() -> None:
    model, run = build(Flat())
    x = torch.ones(2, 4)
    run(x).sum().backward()
    forget()
    for factor in range(1, 11):
        before = run(x)
        set_data(model[0], model[0].weight.detach() * factor)
        set_data(model[1], model[1].weight.detach() * 0.5)
        assert not torch.equal(run(x), before)
    assert not records()


@ranks(2, timeout_s=180)
def test_another_dtype_needs_another_graph() -> None:
    model, run = build(Flat())
    x = torch.ones(2, 4)
    for change in (torch.Tensor.double, torch.Tensor.float):
        run(x).sum().backward()
        model.zero_grad()
        for parameter in model.parameters():
            parameter.data = change(parameter.detach())
        x = change(x)
        assert torch.equal(run(x), model(x))


@ranks(2, timeout_s=180)
def test_a_backward_after_the_change_is_too_late() -> None:
    model, run = build(Flat())
    loss = run(torch.ones(2, 4)).sum()
    set_data(model[0], model[0].weight.detach() * 2)
    with pytest.raises(InvariantError, match="between the forward and the backward"):
        loss.backward()


@ranks(2, timeout_s=180)
def test_units_that_stay_gathered_are_as_they_were() -> None:
    """An eager evaluation leaves full parameters on the modules; that moves no shard."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Linear(4, 4), reshard_after_forward=False)
    run = torch.compile(model, backend="shoal", fullgraph=True, options={"cache": False})
    x = torch.ones(2, 4)
    run(x).sum().backward()
    expected = model.weight.grad.full_tensor()
    model.zero_grad()
    for between in (model.unshard, lambda: model(x).detach()):
        with torch.no_grad():
            between()
        run(x).sum().backward()
        assert torch.equal(model.weight.grad.full_tensor(), expected)
        model.zero_grad()
