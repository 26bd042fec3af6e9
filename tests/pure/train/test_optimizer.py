"""AdamW, learning rate, clipping, and the scale of fp16's loss."""

import copy
from dataclasses import asdict

import pytest
import torch
from torch import nn

from shoal.train.config import OptimConfig
from shoal.train.optimizer import (
    LossScale,
    clip_gradients,
    configure_optimizer,
    learning_rate,
    make_optimizer,
    set_learning_rate,
)


def test_the_rate_rises_linearly_then_falls_to_its_final_share():
    config = OptimConfig(lr=1.0, warmup=10, final_lr=0.1)
    rates = [learning_rate(step, 100, config) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert rates[54] == pytest.approx(0.55)
    assert rates[99] == pytest.approx(0.1)
    assert rates[9:] == sorted(rates[9:], reverse=True)


@pytest.mark.parametrize(("warmup", "num_steps"), [(0, 1), (5, 5), (50, 10)])
def test_short_runs_have_a_rate_too(warmup, num_steps):
    config = OptimConfig(lr=1.0, warmup=warmup)
    rates = [learning_rate(step, num_steps, config) for step in range(1, num_steps + 1)]
    assert all(0 < rate <= 1 for rate in rates)


def test_only_matrices_decay_and_the_config_wins_over_what_was_loaded():
    model = nn.Linear(3, 2)
    optimizer = make_optimizer(model, OptimConfig(weight_decay=0.3))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    saved = copy.deepcopy(optimizer.state_dict())
    other = make_optimizer(model, OptimConfig(weight_decay=0.1, beta2=0.5))
    other.load_state_dict(saved)
    configure_optimizer(other, OptimConfig(weight_decay=0.1, beta2=0.5))
    assert [group["weight_decay"] for group in other.param_groups] == [0.1, 0.0]
    assert {group["betas"] for group in other.param_groups} == {(0.9, 0.5)}
    set_learning_rate(other, 0.25)
    assert {group["lr"] for group in other.param_groups} == {0.25}


@pytest.mark.parametrize("max_norm", [0.01, 100.0, 0.0])
def test_clipping_does_as_torch_does(max_norm):
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    other = copy.deepcopy(model)
    for parameter, source in zip(other.parameters(), model.parameters(), strict=True):
        parameter.grad = source.grad.clone()
    norm = clip_gradients(model, max_norm)
    expected = nn.utils.clip_grad_norm_(other.parameters(), max_norm or float("inf"))
    torch.testing.assert_close(norm, expected)
    for parameter, source in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(source.grad, parameter.grad)


def test_only_fp16_is_scaled():
    for precision in ("auto", "bf16", "fp32"):
        scale = LossScale.for_precision(precision)
        assert scale.factor == 1
        assert not scale.can_shrink
        assert scale.grown() == scale


def test_it_shrinks_at_once_and_grows_slowly_within_bounds():
    scale = LossScale.for_precision("fp16")
    first = scale.factor
    assert scale.shrunk().factor == first / 2
    for _ in range(999):
        scale = scale.grown()
    assert scale.factor == first
    assert scale.grown().factor == 2 * first
    assert scale.shrunk().good_steps == 0
    for _ in range(60):
        scale = scale.shrunk() if scale.can_shrink else scale
    assert scale.factor == 1
    for _ in range(50_000):
        scale = scale.grown()
    assert scale.factor == 2**24


def test_it_comes_back_as_it_was():
    scale = LossScale.for_precision("fp16").grown()
    assert LossScale(**asdict(scale)) == scale
