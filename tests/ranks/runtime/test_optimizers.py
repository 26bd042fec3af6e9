"""What stands between gradients and an update: hooks, scaling, clipping."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from differential import (
    DIM,
    PLAIN,
    SHOAL,
    Block,
    Engine,
    check_engines_agree,
    check_like_plain,
    gradients,
    loss_of,
    snapshot,
    stack,
    two_axes,
)
from harness import ranks
from oracle import full


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
    for batch in engine.batches(3):
        loss = loss_of(model(batch))
        loss.backward()
        seen.append(engine.mean(loss))
    return [*seen, calls, snapshot(model)]


@ranks(2, 4)
def test_optimizers_that_step_in_backward() -> None:
    check_engines_agree(stepped_in_backward)


def scaled(engine: Engine, overflow: str) -> list[Any]:
    """Steps of which the second overflows: in one rank's loss, or in one rank's shard alone."""
    model = engine.shard(stack())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    is_here = not engine.is_sharded or dist.get_rank() == 1
    seen: list[Any] = []
    for index, batch in enumerate(engine.batches(4)):
        loss = loss_of(model(batch))
        if overflow == "loss" and index == 1 and is_here:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if overflow == "shard" and index == 1 and is_here:
            gradient = model.blocks[0].up.weight.grad
            local = gradient.to_local() if engine.is_sharded else gradient
            local[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        seen.append(gradients(model) if index != 1 else None)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(scaler.get_scale())
    return [*seen, snapshot(model)]


@pytest.mark.compose("gradient scaling", "fully_shard", "Even")
@ranks(2, 4)
@pytest.mark.parametrize("overflow", ["nowhere", "loss", "shard"])
def test_gradient_scaling(overflow: str) -> None:
    check_engines_agree(scaled, overflow)


def clipped(
    engine: Engine, norm_type: float, foreach: bool | None, block: Callable[[], nn.Module] = Block
) -> list[Any]:
    model = engine.shard(stack(block))
    loss_of(model(engine.batches(1)[0])).backward()
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


def clipped_late(engine: Engine, max_norm: float) -> list[Any]:
    """Clipping after every backward, though replicas are reduced with each second one only."""
    model = engine.shard(stack(), mesh=two_axes())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[Any] = []
    for index, batch in enumerate(engine.batches(4)):
        last = index % 2 == 1
        if engine.is_sharded:
            model.set_requires_all_reduce(last)
        loss_of(model(batch)).backward()
        if last or engine.is_sharded:
            norm = full(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        if last:
            seen.append([norm, gradients(model)])
            optimizer.step()
            optimizer.zero_grad()
        elif engine.is_sharded:
            # What is not there yet has no norm, and is not clipped.
            assert norm == 0
            assert all(gradient is None for gradient in gradients(model).values())
    return [*seen, snapshot(model, optimizer)]


@ranks(4)
@pytest.mark.parametrize("max_norm", [1e-2, 1e3])
def test_clipping_while_replicas_are_apart(max_norm: float) -> None:
    check_engines_agree(clipped_late, max_norm, exact=True)


def swapped(engine: Engine, **options: Any) -> list[Any]:
    """One optimizer after the other, then two at a time for parameters of the same units."""
    model = engine.shard(stack(), **options)
    parameters = list(model.parameters())
    adam, fresh = (torch.optim.AdamW(parameters, lr=1e-2) for _ in range(2))
    sgd = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)
    halves = [torch.optim.SGD(half, lr=0.1) for half in (parameters[::2], parameters[1::2])]
    turns = [[adam], [sgd], [adam], [fresh], halves, [halves[1]], [sgd]]
    seen: list[Any] = []
    for optimizers, batch in zip(turns, engine.batches(len(turns)), strict=True):
        loss = loss_of(model(batch))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        seen.append([engine.mean(loss), snapshot(model, optimizers[0])])
        model.zero_grad()
        with torch.no_grad():
            seen.append(engine.mean(loss_of(model(batch))))
        if engine.is_sharded:
            model.reshard()  # torch's root stays gathered after any forward
    return seen


@ranks(2, 4)
@pytest.mark.parametrize("reshard_after_forward", [None, False])
def test_optimizers_that_take_turns(reshard_after_forward: bool | None) -> None:
    def scenario(engine: Engine) -> list[Any]:
        return swapped(engine, reshard_after_forward=reshard_after_forward)

    check_engines_agree(scenario)


def held(engine: Engine) -> list[Any]:
    """Losses of a model whose parameters stay gathered while one of several optimizers steps."""
    model = engine.shard(stack())
    parameters = list(model.parameters())
    if engine.is_sharded:
        model.set_reshard_after_backward(False)
    # These change shards below autograd, where no version is counted.
    optimizers = [
        torch.optim.SGD(parameters, lr=0.1, foreach=True),
        torch.optim.SGD(parameters[::2], lr=0.1, foreach=True),
        torch.optim.SGD(parameters[1::2], lr=0.1, foreach=True),
    ]
    seen: list[Any] = []
    for optimizer, batch in zip(2 * optimizers, engine.batches(6), strict=True):
        loss = loss_of(model(batch))
        loss.backward()
        optimizer.step()
        optimizers[0].zero_grad()
        with torch.no_grad():
            seen.append([engine.mean(loss), engine.mean(loss_of(model(batch)))])
    return seen


@ranks(2)
def test_optimizers_that_take_turns_while_parameters_stay_gathered() -> None:
    """Torch's engine goes on with the weights from before the step."""
    check_like_plain(held(SHOAL), held(PLAIN))


def linear() -> nn.Module:
    return nn.Linear(DIM, DIM)


def switched(engine: Engine, foreach: bool) -> list[Any]:
    model = engine.shard(stack())
    everything = list(model.parameters())
    first, second = (list(block.parameters()) for block in model.blocks[:2])
    optimizer = torch.optim.SGD(first, lr=0.5, foreach=foreach)
    if engine.is_sharded:
        model.set_reshard_after_backward(False)
    seen: list[Any] = []
    for index, batch in enumerate(engine.batches(6)):
        loss = loss_of(model(batch))
        loss.backward()
        seen.append(engine.mean(loss))
        optimizer.param_groups[0]["params"] = first if index < 2 else second
        optimizer.step()
        for parameter in everything:
            parameter.grad = None
    return seen


@ranks(2)
@pytest.mark.parametrize("foreach", [False, True])
def test_a_group_that_is_pointed_at_other_parameters(foreach: bool) -> None:
    check_like_plain(switched(SHOAL, foreach), switched(PLAIN, foreach))
