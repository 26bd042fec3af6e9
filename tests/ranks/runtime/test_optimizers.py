"""What stands between gradients and an update: hooks, scaling, clipping."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from harness import ranks
from peers import (
    DIM,
    Engine,
    check_engines_agree,
    gradients,
    inputs,
    loss_of,
    mlp,
    snapshot,
    stack,
)


def stepped_in_backward(engine: Engine) -> list[Any]:
    model = engine.shard(stack())
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}
    calls: list[bool] = []

    def step(parameter: torch.Tensor) -> None:
        calls.append(parameter.grad is not None)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    seen: list[Any] = []
    for batch in inputs(3):
        loss = loss_of(model(engine.part(batch)))
        loss.backward()
        seen.append(engine.mean(loss))
    return [*seen, calls, snapshot(model)]


@ranks(2, 4)
def test_optimizers_that_step_in_backward() -> None:
    check_engines_agree(stepped_in_backward)


def scaled(engine: Engine, overflow: bool) -> list[Any]:
    model = engine.shard(stack())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    seen: list[Any] = []
    for index, batch in enumerate(inputs(4)):
        loss = loss_of(model(engine.part(batch)))
        if overflow and index == 1 and (not engine.is_sharded or dist.get_rank() == 1):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        seen.append(gradients(model) if index != 1 else None)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(scaler.get_scale())
    return [*seen, snapshot(model)]


@ranks(2)
@pytest.mark.parametrize("overflow", [False, True])
def test_gradient_scaling(overflow: bool) -> None:
    check_engines_agree(scaled, overflow)


def clipped(
    engine: Engine, norm_type: float, foreach: bool | None, block: Callable[[], nn.Module] = mlp
) -> list[Any]:
    model = engine.shard(stack(block))
    loss_of(model(engine.part(inputs(1)[0]))).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-2, norm_type, foreach=foreach)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return [norm, gradients(model)]


@ranks(2, 4)
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0])
def test_clipping_by_norm(norm_type: float, foreach: bool | None) -> None:
    check_engines_agree(clipped, norm_type, foreach)


@ranks(2)
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_by_the_largest_element(foreach: bool | None) -> None:
    """Where no rank's shard is empty, since torch has no such norm of nothing."""
    check_engines_agree(clipped, float("inf"), foreach, linear)


def linear() -> nn.Module:
    return nn.Linear(DIM, DIM)
