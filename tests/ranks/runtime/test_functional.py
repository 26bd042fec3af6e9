"""Function transforms and gradients of gradients: right, or refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from differential import (
    PLAIN,
    SHOAL,
    TORCH,
    Engine,
    Steady,
    check_engines_agree,
    check_like_plain,
    check_names,
    check_same,
    error_of,
    gradients,
    loss_of,
    stack,
    train,
)
from harness import ranks
from shoal.errors import InvariantError

FUNCTIONS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "grad": lambda m, x: torch.func.grad(lambda y: loss_of(m(y)))(x),
    "vjp": lambda m, x: torch.func.vjp(m, x)[1](torch.ones(len(x), 3))[0],
    "jvp": lambda m, x: torch.func.jvp(m, (x,), (torch.ones_like(x),))[1].detach(),
    "vmap": lambda m, x: torch.func.vmap(m)(x).detach(),
}


def transformed(engine: Engine, name: str) -> list[Any]:
    """A transform of the model, and ordinary steps after it."""
    model = engine.shard(stack(Steady))
    found = FUNCTIONS[name](model, engine.batches(1)[0])
    model.reshard()  # before the optimizer looks for parameters
    return [found, gradients(model), train(engine, model, engine.batches(2))]


@ranks(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_transforms_work_or_are_refused(name: str) -> None:
    expected = transformed(TORCH, name)
    try:
        found = transformed(SHOAL, name)
    except NotImplementedError as error:
        check_names(error, "torch.func")
        return
    check_same(found, expected, exact=True, where=name)


def called_functionally(engine: Engine) -> list[Any]:
    model = engine.shard(stack())
    seen: list[Any] = []
    for batch in engine.batches(2):
        parameters = dict(model.named_parameters())
        loss = loss_of(torch.func.functional_call(model, parameters, batch))
        loss.backward()
        seen.append([engine.mean(loss), gradients(model)])
    return seen


@ranks(2)
def test_a_functional_call_with_the_models_own_parameters() -> None:
    check_engines_agree(called_functionally)


@ranks(2)
def test_a_functional_call_with_other_parameters_is_right_or_refused() -> None:
    """Torch's engine ignores the parameters it is given."""
    results = []
    for engine in (PLAIN, SHOAL):
        model = engine.shard(stack())
        train(engine, model, engine.batches(1))
        others = {name: p.detach() * 2 for name, p in model.named_parameters()}
        part = engine.batches(1)[0]
        try:
            output = torch.func.functional_call(model, others, part)
        except (InvariantError, NotImplementedError):
            return
        results.append(engine.mean(loss_of(output)))
    check_like_plain(results[1], results[0])


def asked_for_shards(engine: Engine) -> list[Any]:
    """The shards are no part of the graph; gradients come to them, not through them."""
    model = engine.shard(stack())
    shards = list(model.blocks[0].parameters())
    loss = loss_of(model(engine.batches(1)[0]))
    return [error_of(lambda: torch.autograd.grad(loss, shards))]


@ranks(2)
def test_gradients_of_shards_cannot_be_asked_for() -> None:
    check_engines_agree(asked_for_shards, plain=False)
