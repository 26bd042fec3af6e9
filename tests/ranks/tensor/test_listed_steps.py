"""Optimizers, clipping and loss scaling on listed shards: one each, several, or none on a rank."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from cuts import random_tensors
from harness import ranks
from listed_cuts import CUTS, listed
from shoal.tensor import ShardedTensor

SHAPES = [(9, 4), (7,), (2, 3, 5), (1,)]

adam, adamw, sgd = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD

EXACT: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD one by one": lambda p: sgd(p, lr=0.1, momentum=0.9, foreach=False),
    "SGD foreach": lambda p: sgd(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "Adam one by one": lambda p: adam(p, lr=0.1, foreach=False),
    "Adam foreach": lambda p: adam(p, lr=0.1, amsgrad=True, foreach=True),
    "AdamW one by one": lambda p: adamw(p, lr=0.1, foreach=False),
    "AdamW foreach": lambda p: adamw(p, lr=0.1, foreach=True),
    "RMSprop foreach": lambda p: torch.optim.RMSprop(p, lr=0.1, foreach=True),
}
FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: sgd(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: adam(p, lr=0.1, fused=True, amsgrad=True),
    "AdamW": lambda p: adamw(p, lr=0.1, fused=True),
}

cuts = pytest.mark.parametrize("cut", CUTS)


def both(cut: str) -> tuple[list[nn.Parameter], list[Any]]:
    whole = [nn.Parameter(tensor) for tensor in random_tensors(SHAPES)]
    ours = [nn.Parameter(listed(tensor, CUTS[cut](tuple(tensor.shape)))) for tensor in whole]
    # A plain parameter among them is what most models have.
    plain = random_tensors([(3,)], seed=9)[0]
    return [*whole, nn.Parameter(plain.clone())], [*ours, nn.Parameter(plain.clone())]


def give_gradients(
    whole: Iterable[Any], ours: Iterable[Any], seed: int, scale: float = 1.0
) -> None:
    gradients = random_tensors([*SHAPES, (3,)], seed=seed)
    for gradient, expected, parameter in zip(gradients, whole, ours, strict=True):
        expected.grad = gradient * scale
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad.copy_(expected.grad)


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, ShardedTensor) else value


def steps(build: Callable[[Any], torch.optim.Optimizer], cut: str) -> list[tuple[Any, Any]]:
    """Pairs of whole and sharded parameters and state after a few steps of both."""
    whole, ours = both(cut)
    optimizers = build(whole), build(ours)
    for step in range(3):
        give_gradients(whole, ours, seed=step + 1)
        for optimizer in optimizers:
            optimizer.step()
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    pairs = [
        (expected.detach(), full(found.detach()))
        for expected, found in zip(whole, ours, strict=True)
    ]
    for index, state in states[0].items():
        pairs += [(value, full(states[1][index][name])) for name, value in state.items()]
    return pairs


@ranks(1, 2, 4)
@cuts
def test_steps_equal_unsharded_ones(cut: str) -> None:
    for name, build in EXACT.items():
        for expected, found in steps(build, cut):
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected)), name


@ranks(1, 2, 4)
@cuts
def test_fused_steps_equal_unsharded_ones(cut: str) -> None:
    for name, build in FUSED.items():
        for expected, found in steps(build, cut):
            # Fused kernels round the last elements of a tensor, which cuts change, differently.
            torch.testing.assert_close(found, expected, msg=name)


@ranks(2, 4)
@cuts
@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_finds_the_norm_of_the_whole(cut: str, foreach: bool) -> None:
    for order in (1.0, 2.0, math.inf):
        whole, ours = both(cut)
        give_gradients(whole, ours, seed=1)
        norm = clip_grad_norm_(whole, 1.0, order, foreach=foreach)
        torch.testing.assert_close(clip_grad_norm_(ours, 1.0, order, foreach=foreach), norm)
        for expected, parameter in zip(whole, ours, strict=True):
            torch.testing.assert_close(full(parameter.grad), expected.grad)


@pytest.mark.sampled
@ranks(2, 4)
@cuts
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bad", [None, 0, -1])
def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks(
    cut: str, fused: bool, bad: int | None
) -> None:
    whole, ours = both(cut)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    optimizers = [adamw(parameters, lr=0.1, fused=fused) for parameters in (whole, ours)]
    give_gradients(whole, ours, seed=1, scale=8.0)
    if bad is not None:
        assert whole[0].grad is not None
        whole[0].grad.view(-1)[bad] = math.inf
        ours[0].grad.copy_(whole[0].grad)
    for scaler, optimizer in zip(scalers, optimizers, strict=True):
        scaler.scale(torch.zeros(()))  # makes the scale's tensor
        scaler.step(optimizer)
        scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == (8.0 if bad is None else 4.0)
    for expected, parameter in zip(whole, ours, strict=True):
        torch.testing.assert_close(full(parameter.detach()), expected.detach())


LISTS: dict[str, Callable[[list[Any], list[Any]], Sequence[Any]]] = {
    "add": lambda x, y: torch._foreach_add(x, y, alpha=2),
    "number": lambda x, y: torch._foreach_mul(x, 3.0),
    "numbers": lambda x, y: torch._foreach_mul(x, [float(i + 1) for i in range(len(x))]),
    "0-d": lambda x, y: torch._foreach_mul(x, torch.tensor(3.0)),
    "0-d each": lambda x, y: torch._foreach_div(x, [torch.tensor(i + 1.0) for i in range(len(x))]),
    "addcdiv": lambda x, y: torch._foreach_addcdiv(x, x, y, [0.1 * i for i in range(len(x))]),
    "addcmul": lambda x, y: torch._foreach_addcmul(x, x, y, 0.5),
    "lerp": lambda x, y: torch._foreach_lerp(x, y, 0.25),
    "sqrt": lambda x, y: torch._foreach_sqrt(torch._foreach_abs(x)),
    "maximum": lambda x, y: torch._foreach_maximum(x, y),
    "norm": lambda x, y: torch._foreach_norm(x, 2),
}
IN_PLACE: dict[str, Callable[[list[Any], list[Any]], object]] = {
    "add": lambda x, y: torch._foreach_add_(x, y),
    "copy": lambda x, y: torch._foreach_copy_(x, y),
    "zero": lambda x, y: torch._foreach_zero_(x),
    "numbers": lambda x, y: torch._foreach_sub_(x, [float(i) for i in range(len(x))]),
    "pow": lambda x, y: torch._foreach_pow_(x, 2),
}


@ranks(1, 2)
@cuts
def test_operations_on_lists_equal_unsharded_ones(cut: str) -> None:
    with torch.no_grad():
        lists = [both(cut), both(cut)]
        (x, ours), (_, others) = lists
        y = random_tensors([*SHAPES, (3,)], seed=5)
        for other, value in zip(others, y, strict=True):
            other.copy_(value)
        for name, call in LISTS.items():
            for found, expected in zip(call(ours, others), call([*x], y), strict=True):
                torch.testing.assert_close(full(found), expected.detach(), msg=name)
        for name, call in IN_PLACE.items():
            call(ours, others)
            call([*x], y)
            for found, expected in zip(ours, x, strict=True):
                assert torch.equal(full(found.detach()), expected.detach()), name


@ranks(2)
def test_several_shards_stay_the_tensors_that_they_are() -> None:
    _, ours = both("several shards")
    before = [shard.tensor for shard in ours[0].local_shards()]
    assert len(before) == 2
    ours[0].grad = torch.ones_like(ours[0])
    adamw(ours, lr=0.1, foreach=True).step()
    after = [shard.tensor for shard in ours[0].local_shards()]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert copy.deepcopy(ours[0]).full_tensor().equal(ours[0].full_tensor())
