"""Optimizers, clipping and loss scaling on sharded tensors train as on whole ones, bit by bit."""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from cuts import LAYOUTS, parameters, random_tensors
from harness import ranks
from shoal.comm.transport import Transport
from shoal.layout import Flat, Layout, Rows, Whole
from shoal.tensor import ShardedTensor

Parameters = Iterable[nn.Parameter]
Build = Callable[[Parameters], torch.optim.Optimizer]

adamw, sgd = torch.optim.AdamW, torch.optim.SGD

EXACT: dict[str, Build] = {
    "AdamW one by one": lambda p: adamw(p, lr=0.1, foreach=False),
    "AdamW foreach": lambda p: adamw(p, lr=0.1, foreach=True),
    "AdamW foreach, amsgrad": lambda p: adamw(p, lr=0.1, foreach=True, amsgrad=True),
    "SGD": lambda p: sgd(p, lr=0.1, momentum=0.9, foreach=False),
    "SGD foreach": lambda p: sgd(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True
    ),
    "RMSprop foreach": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, foreach=True),
    "Adadelta foreach": lambda p: torch.optim.Adadelta(p, lr=0.1, foreach=True),
    "Adagrad foreach": lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=True),
    "Adamax foreach": lambda p: torch.optim.Adamax(p, lr=0.1, foreach=True),
    "ASGD foreach": lambda p: torch.optim.ASGD(p, lr=0.1, foreach=True),
    "NAdam foreach": lambda p: torch.optim.NAdam(p, lr=0.1, foreach=True),
    "RAdam foreach": lambda p: torch.optim.RAdam(p, lr=0.1, foreach=True),
    "Rprop foreach": lambda p: torch.optim.Rprop(p, lr=0.1, foreach=True),
}

FUSED: dict[str, Build] = {
    "AdamW": lambda p: adamw(p, lr=0.1, fused=True),
    "AdamW, amsgrad": lambda p: adamw(p, lr=0.1, fused=True, amsgrad=True),
    "AdamW, lr in a tensor": lambda p: adamw(p, lr=torch.tensor(0.1), fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "SGD": lambda p: sgd(p, lr=0.1, momentum=0.9, fused=True),
    "SGD without momentum": lambda p: sgd(p, lr=0.1, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


def both(layout: Layout) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    whole = [nn.Parameter(tensor) for tensor in random_tensors()]
    return whole, parameters(whole, layout)


def give_gradients(whole: Parameters, ours: Parameters, seed: int, scale: float = 1.0) -> None:
    # Of so many random tensors, the first ones serve where there are fewer parameters.
    for gradient, expected, parameter in zip(random_tensors(seed=seed), whole, ours, strict=False):
        expected.grad = gradient * scale
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad.copy_(expected.grad)


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, ShardedTensor) else value


def assert_same_state(whole: torch.optim.Optimizer, ours: torch.optim.Optimizer) -> None:
    expected, found = (optimizer.state_dict()["state"] for optimizer in (whole, ours))
    assert expected.keys() == found.keys()
    for index, state in expected.items():
        assert state.keys() == found[index].keys()
        for name, value in state.items():
            assert torch.equal(full(found[index][name]), value), name


@ranks(2, 4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_steps_equal_unsharded_ones(layout: Layout) -> None:
    for name, build in EXACT.items():
        whole, ours = both(layout)
        optimizers = build(whole), build(ours)
        for step in range(3):
            give_gradients(whole, ours, seed=step + 1)
            for optimizer in optimizers:
                optimizer.step()
        for expected, parameter in zip(whole, ours, strict=True):
            assert torch.equal(full(parameter.detach()), expected), name
        assert_same_state(*optimizers)


@ranks(2, 4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fused_steps_equal_those_of_plain_local_tensors(layout: Layout) -> None:
    for name, build in FUSED.items():
        whole, ours = both(layout)
        # The CPU kernels round the last few elements of a tensor differently, so that bits
        # can be the same only where tensors are cut the same.
        local = [nn.Parameter(parameter.local.clone()) for parameter in ours]
        optimizers = build(whole), build(ours), build(local)
        for step in range(3):
            give_gradients(whole, ours, seed=step + 1)
            for plain, parameter in zip(local, ours, strict=True):
                plain.grad = parameter.grad.local.clone()
            for optimizer in optimizers:
                optimizer.step()
        for expected, parameter, plain in zip(whole, ours, local, strict=True):
            assert torch.equal(parameter.local, plain), name
            torch.testing.assert_close(full(parameter.detach()), expected.detach(), msg=name)


@ranks(2, 4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_clipping_finds_the_norm_of_the_whole(layout: Layout) -> None:
    for order in (1.0, 2.0, math.inf):
        for foreach in (None, True, False):
            whole, ours = both(layout)
            if order == math.inf:
                whole, ours = whole[:-1], ours[:-1]  # nothing has no largest element
            give_gradients(whole, ours, seed=1)
            norm = clip_grad_norm_(whole, 1.0, order, foreach=foreach)
            found = clip_grad_norm_(ours, 1.0, order, foreach=foreach)
            assert type(found) is torch.Tensor
            torch.testing.assert_close(found, norm)
            for expected, parameter in zip(whole, ours, strict=True):
                torch.testing.assert_close(full(parameter.grad), expected.grad)


@ranks(2)
def test_clipping_by_lists_communicates_once() -> None:
    _, ours = both(Flat())
    for parameter in ours:
        parameter.grad = torch.ones_like(parameter)
    with patch.object(
        Transport, "all_reduce", autospec=True, side_effect=Transport.all_reduce
    ) as all_reduce:
        clip_grad_norm_(ours, 1.0)
    assert all_reduce.call_count == 1


@ranks(2, 4)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bad", [None, 0, -1])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(
    fused: bool, bad: int | None
) -> None:
    for layout in (Flat(), Whole()):
        whole, ours = both(layout)
        scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
        optimizers = [adamw(p, lr=0.1, fused=fused) for p in (whole, ours)]
        give_gradients(whole, ours, seed=1, scale=8.0)
        if bad is not None:
            whole[0].grad.view(-1)[bad] = math.inf
            ours[0].grad.copy_(whole[0].grad)
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.scale(torch.zeros(()))  # makes the scale's tensor
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale() == (8.0 if bad is None else 4.0)
        for expected, parameter in zip(whole, ours, strict=True):
            torch.testing.assert_close(full(parameter.detach()), expected.detach())


@ranks(2)
@pytest.mark.parametrize("layout", [Rows(), Whole()], ids=str)
def test_optimizer_state_dicts_load_and_copy(layout: Layout) -> None:
    whole, ours = both(layout)
    optimizer = adamw(ours, lr=0.1)
    give_gradients(whole, ours, seed=1)
    optimizer.step()
    resumed, copied = parameters(whole, layout), copy.deepcopy(optimizer)
    with torch.no_grad():
        for target, source in zip(resumed, ours, strict=True):
            target.copy_(source)
    other = adamw(resumed, lr=0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    give_gradients(whole, ours, seed=2)
    for parameters_, step in ((resumed, other), (copied.param_groups[0]["params"], copied)):
        for target, source in zip(parameters_, ours, strict=True):
            target.grad = source.grad.clone()
        step.step()
    optimizer.step()
    for first, *rest in zip(ours, resumed, copied.param_groups[0]["params"], strict=True):
        for other_parameter in rest:
            assert torch.equal(full(first.detach()), full(other_parameter.detach()))


@ranks(2)
def test_zero_grad_and_accumulation() -> None:
    _, (first, *_) = both(Flat())
    for _ in range(2):
        (first * 2).backward(torch.ones_like(first))
    assert torch.equal(full(first.grad), torch.full(first.shape, 4.0))
    sgd([first], lr=0.1, foreach=True).zero_grad(set_to_none=False)
    assert not full(first.grad).any()
