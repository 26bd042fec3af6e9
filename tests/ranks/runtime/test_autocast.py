"""Autocast around a sharded model: it casts full parameters, as it casts unsharded ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from differential import (
    SHOAL,
    Block,
    Engine,
    check_engines_agree,
    check_same,
    gradients,
    loss_of,
    snapshot,
    stack,
    train,
)
from harness import ranks

BF16 = torch.bfloat16


def cast(**options: Any) -> torch.autocast:
    return torch.autocast("cpu", dtype=BF16, **options)


def cast_loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    with cast():
        output = model(x)
    assert output.dtype is BF16
    return loss_of(output)


class Recomputing(Block):
    """Computes again in backward, where nobody casts any more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@ranks(2)
@pytest.mark.parametrize("block", [Block, Recomputing])
@pytest.mark.parametrize("reshard_after_forward", [None, False])
def test_a_model_without_a_policy(
    block: Callable[[], nn.Module], reshard_after_forward: bool | None
) -> None:
    def scenario(engine: Engine) -> list[Any]:
        model = engine.shard(stack(block), reshard_after_forward=reshard_after_forward)
        return train(engine, model, loss=cast_loss)

    check_engines_agree(scenario, plain=False)


@ranks(2)
@pytest.mark.parametrize(
    "dtypes",
    [
        {"reduce_dtype": BF16},
        {"param_dtype": BF16, "reduce_dtype": torch.float32},
        {"param_dtype": torch.float32, "cast_forward_inputs": False},
    ],
    ids=["reduce", "param", "uncast"],
)
def test_a_model_with_a_policy_of_its_own(dtypes: dict[str, Any]) -> None:
    def scenario(engine: Engine) -> list[Any]:
        return train(engine, engine.shard(stack(), dtypes), loss=cast_loss)

    check_engines_agree(scenario, plain=False)


def accumulated(engine: Engine, remembers: bool) -> list[Any]:
    """Two backwards and an evaluation in one autocast, which may remember the weights it cast."""
    model = engine.shard(stack())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    for _ in range(3):
        with cast(cache_enabled=remembers):
            for index, x in enumerate(engine.batches(2)):
                if engine.is_sharded:
                    model.set_requires_gradient_sync(index == 1)
                loss_of(model(x)).backward()
            with torch.no_grad():
                seen.append(engine.mean(loss_of(model(x))))
        if engine.is_sharded:
            model.reshard()  # torch's root stays gathered after any forward
        seen.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, snapshot(model)]


@ranks(2)
@pytest.mark.parametrize("remembers", [True, False])
def test_several_forwards_under_one_autocast(remembers: bool) -> None:
    check_engines_agree(accumulated, remembers, plain=False)


@ranks(2)
def test_outputs_are_those_of_the_unsharded_model() -> None:
    """To the bit: with full parameters, a rank does on its rows what anybody does."""
    plain, sharded = stack(), SHOAL.shard(stack())
    for x in SHOAL.batches():
        with cast():
            expected, found = plain(x), sharded(x)
        check_same(found, expected, exact=True, where="plain")
