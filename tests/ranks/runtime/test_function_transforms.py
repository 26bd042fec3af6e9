"""`torch.func` of a sharded module, inside of a block that has its full parameters and outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

from differential import DIM, PLAIN, SHOAL, Steady, check_close, loss_of, stack, train
from harness import ranks
from shoal.fsdp import FullyShardedDataParallel, full_parameters, fully_shard
from shoal.fsdp.wrap import ModuleWrapPolicy
from shoal.layout import Block, Even, Flat, Rows, Whole

Parameters = dict[str, Tensor]


def sharded(layout: Any) -> Callable[[], Any]:
    return lambda: SHOAL.shard(stack(Steady), layout=layout)


def wrapped(**options: Any) -> Callable[[], Any]:
    def make() -> Any:
        policy, device = ModuleWrapPolicy({Steady}), torch.device("cpu")
        return FullyShardedDataParallel(
            stack(Steady), auto_wrap_policy=policy, device_id=device, **options
        )

    return make


DOORS: dict[str, Callable[[], Any]] = {
    **{type(one).__name__: sharded(one) for one in (Even(), Flat(), Rows(), Block(5), Whole())},
    "flat wrapper": wrapped(),
    "wrapper": wrapped(use_orig_params=True),
}


@contextmanager
def whole(model: Any) -> Iterator[Parameters]:
    """All parameters in full, by the names that the module has."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            yield {name: p.detach() for name, p in model.module.named_parameters()}
        return
    with full_parameters(model):
        yield {name: p.detach() for name, p in model.named_parameters()}


def called(model: Any, parameters: Parameters, x: Tensor) -> Tensor:
    target = model.module if isinstance(model, FullyShardedDataParallel) else model
    return functional_call(target, parameters, x)


def loss(model: Any) -> Callable[[Parameters, Tensor], Tensor]:
    return lambda parameters, x: loss_of(called(model, parameters, x))


def samples(model: Any, p: Parameters, x: Tensor) -> Any:
    """Per-sample gradients."""
    return vmap(grad(loss(model)), in_dims=(None, 0))(p, x[:, None])


def ensemble(model: Any, p: Parameters, x: Tensor) -> Any:
    """Several models at once."""
    several = {name: torch.stack([value, 2 * value]) for name, value in p.items()}
    return vmap(lambda q: called(model, q, x))(several)


def adapted(model: Any, p: Parameters, x: Tensor) -> Any:
    """A gradient through a step of descent, with autograd."""
    start = {name: value.clone().requires_grad_() for name, value in p.items()}
    values = list(start.values())
    inner = torch.autograd.grad(loss(model)(start, x), values, create_graph=True)
    moved = {name: q - 0.1 * g for (name, q), g in zip(start.items(), inner, strict=True)}
    return torch.autograd.grad(loss(model)(moved, x), values)


def cleaned(found: Any) -> Any:
    """By the names of the original model, which the modules of a wrapper have not."""
    if not isinstance(found, dict):
        return found
    return {name.replace("_fsdp_wrapped_module.", ""): value for name, value in found.items()}


FUNCTIONS: dict[str, Callable[[Any, Parameters, Tensor], Any]] = {
    "call": lambda m, p, x: called(m, {name: 2 * value for name, value in p.items()}, x),
    "grad": lambda m, p, x: grad(loss(m))(p, x),
    "grad of inputs": lambda m, _, x: grad(lambda y: loss_of(m(y)))(x),
    "grad of grad": lambda m, p, x: grad(lambda y: grad(loss(m), argnums=1)(p, y).square().sum())(
        x
    ),
    "vjp": lambda m, _, x: vjp(m, x)[1](torch.ones(len(x), 3))[0],
    "jvp": lambda m, _, x: jvp(m, (x,), (torch.ones_like(x),)),
    "vmap": lambda m, _, x: vmap(m)(x),
    "jacobian": lambda m, _, x: jacrev(m)(x[0]),
    "samples": samples,
    "ensemble": ensemble,
    "adapted": adapted,
}


@ranks(2, 4)
@pytest.mark.parametrize("door", DOORS)
def test_functions_of_full_parameters(door: str) -> None:
    """Each rank by itself, with the numbers of the unsharded module; then training goes on."""
    model, plain = DOORS[door](), stack(Steady)
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(2))
    for name, function in FUNCTIONS.items():
        with whole(model) as parameters:
            found = cleaned(function(model, parameters, x))
        expected = function(plain, {n: p.detach() for n, p in plain.named_parameters()}, x)
        torch.testing.assert_close(found, expected, msg=lambda m, n=name: f"{n}: {m}")
    if not isinstance(model, FullyShardedDataParallel):
        train(SHOAL, model, SHOAL.batches(1))
        train(PLAIN, plain, PLAIN.batches(1))
        check_close(model, plain)


@ranks(2)
def test_a_step_by_functional_gradients() -> None:
    """What a transform gives is written back, the same on every rank."""
    model, plain = SHOAL.shard(stack(Steady)), stack(Steady)
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(2))
    with full_parameters(model, writeback=True), torch.no_grad():
        found = dict(model.named_parameters())
        grads = grad(loss(model))({name: p.detach() for name, p in found.items()}, x)
        for name, parameter in found.items():
            parameter.sub_(0.1 * grads[name])
    loss_of(plain(x)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    plain.zero_grad()
    check_close(model, plain)


@ranks(2)
def test_outside_of_the_block_gradients_are_refused() -> None:
    model = fully_shard(nn.Linear(DIM, 3))
    with pytest.raises(NotImplementedError, match=r"full_parameters\(model\)"):
        grad(lambda x: model(x).sum())(torch.ones(2, DIM))
    train(SHOAL, model, [torch.ones(2, DIM)])


@ranks(2)
@pytest.mark.parametrize("transform", [grad, vmap])
def test_outside_of_the_block_the_wrapper_refuses(transform: Any) -> None:
    model = DOORS["wrapper"]()
    with pytest.raises(NotImplementedError, match="summon_full_params"):
        transform(lambda x: model(x).sum())(torch.ones(2, DIM))
    train(SHOAL, model, [torch.ones(2, DIM)])


def by_vmap(model: Any, x: Tensor) -> Tensor:
    return vmap(model)(x).square().mean()


def by_tangents(model: Any, x: Tensor) -> Tensor:
    """A loss that backward reaches by the output's tangent alone, as in flow matching."""
    _, tangent = jvp(model, (x,), (torch.ones_like(x),))
    return tangent.square().mean()


def by_both(model: Any, x: Tensor) -> Tensor:
    """Inputs with gradients, two calls, and a tangent that is a target."""
    output, tangent = jvp(lambda y: model(y), (x.clone().requires_grad_(),), (x,))
    return (output - tangent.detach()).square().mean() + model(x).square().mean()


def by_vmap_of_tangents(model: Any, x: Tensor) -> Tensor:
    return vmap(lambda v: jvp(model, (x,), (v,))[1])(torch.stack([x, 2 * x])).square().mean()


LOSSES = {one.__name__: one for one in (by_vmap, by_tangents, by_both, by_vmap_of_tangents)}


@ranks(2)
@pytest.mark.parametrize("door", [door for door in DOORS if "wrapper" not in door])
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_through_forward_transforms(door: str, name: str) -> None:
    """`vmap` and `jvp` outside of the block, with the gradients of the unsharded module."""
    model, plain = DOORS[door](), stack(Steady)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    for step in range(3):
        x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            torch.testing.assert_close(vmap(model)(x), vmap(plain)(x))
        found, expected = LOSSES[name](model, x), LOSSES[name](plain, x)
        torch.testing.assert_close(found, expected)
        found.backward()
        expected.backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
    with whole(model) as parameters:
        found = cleaned({k: v.clone() for k, v in parameters.items()})
    torch.testing.assert_close(found, {k: v.detach() for k, v in plain.named_parameters()})
