"""How gradients are reduced: own collectives, hooks, factors, unused parameters."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import ranks
from peers import (
    DIM,
    SHOAL,
    Engine,
    LoggedGather,
    LoggedReduce,
    check_engines_agree,
    check_same,
    gradients,
    inputs,
    loss_of,
    mlp,
    stack,
    train,
)


def custom(engine: Engine, dtypes: dict[str, Any]) -> list[Any]:
    """Own collectives: they get the unit's buffers, and their results count."""
    model = engine.shard(stack(num=2), dtypes)
    comms = []
    log: list[str] = []
    for name in ("", "blocks.0"):
        gather, reduce = LoggedGather(name, log), LoggedReduce(name, log)
        comms.append((gather, reduce))
        model.get_submodule(name).set_custom_all_gather(gather)
        model.get_submodule(name).set_custom_reduce_scatter(reduce)
    steps = train(engine, model, 2)
    used = [
        (
            {(b.dtype, b.dim(), str(b.device)) for b in gather.buffers},
            {(b.dtype, b.dim(), str(b.device)) for b in reduce.buffers},
            [op == dist.ReduceOp.AVG for op in reduce.ops],
        )
        for gather, reduce in comms
    ]
    return [steps, used, sorted(log)]


@ranks(2)
@pytest.mark.parametrize("dtypes", [{}, {"param_dtype": torch.bfloat16}])
def test_own_collectives(dtypes: dict[str, Any]) -> None:
    check_engines_agree(custom, dtypes, plain=False)


class Doubling(LoggedReduce):
    """A reduction whose result shows that it was this one."""

    def __call__(self, output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        work = super().__call__(output_tensor, *args, **kwargs)
        if work is not None:
            work.wait()
        output_tensor.mul_(2)


def doubled(engine: Engine) -> list[Any]:
    model = engine.shard(stack(num=2))
    model.blocks[1].set_custom_reduce_scatter(Doubling("", []))
    loss_of(model(engine.part(inputs(1)[0]))).backward()
    return [gradients(model)]


@ranks(2)
def test_what_an_own_reduction_writes_is_the_gradient() -> None:
    check_engines_agree(doubled, plain=False)


def hooked(engine: Engine) -> list[Any]:
    """A hook between reduction and gradient, as for an own replicate axis."""
    model = engine.shard(stack(num=2), {"reduce_dtype": torch.float64})
    seen: list[Any] = []

    def hook(reduced: torch.Tensor) -> None:
        seen.append((reduced.dtype, reduced.dim()))
        dist.all_reduce(reduced)

    model.blocks[1].set_all_reduce_hook(hook)
    for batch in inputs(2):
        loss_of(model(engine.part(batch))).backward()
    return [seen, gradients(model)]


@ranks(2)
def test_a_hook_between_reduction_and_gradient() -> None:
    check_engines_agree(hooked, plain=False)


def divided(engine: Engine, factor: float | None, force: bool, dtypes: dict[str, Any]) -> list[Any]:
    model = engine.shard(stack(num=2), dtypes)
    for module in (model, *model.blocks):
        if factor is not None:
            module.set_gradient_divide_factor(factor)
        module.set_force_sum_reduction_for_comms(force)
    loss_of(model(engine.part(inputs(1)[0]))).backward()
    return [gradients(model)]


@ranks(2)
@pytest.mark.parametrize("reduce", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("factor", "force"), [(None, True), (2.0, False), (1.0, True), (6.0, True)]
)
def test_divide_factors(factor: float | None, force: bool, reduce: torch.dtype) -> None:
    check_engines_agree(divided, factor, force, {"reduce_dtype": reduce}, plain=False)


@ranks(2, 4)
def test_a_divide_factor_replaces_the_number_of_ranks() -> None:
    """Also where the backend has no operation that multiplies first, which torch needs."""
    plain, sharded = stack(num=2), SHOAL.shard(stack(num=2))
    for module in (sharded, *sharded.blocks):
        module.set_gradient_divide_factor(0.5)
    (batch,) = inputs(1)
    loss_of(plain(batch)).backward()
    loss_of(sharded(SHOAL.part(batch))).backward()
    factor = dist.get_world_size() / 0.5
    expected = {n: p.grad * factor for n, p in plain.named_parameters() if p.grad is not None}
    check_same(gradients(sharded), expected, exact=False, where="plain")


def one_divided(engine: Engine) -> list[Any]:
    """The old name of the same; and of one unit alone."""
    model = engine.shard(stack(num=2))
    model.blocks[0].set_force_sum_reduction_for_comms(True)
    with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
        model.blocks[0].set_reduce_scatter_divide_factor(1.0)
    loss_of(model(engine.part(inputs(1)[0]))).backward()
    return [gradients(model)]


@ranks(2)
def test_factors_are_for_one_unit() -> None:
    check_engines_agree(one_divided, plain=False)


class Expert(nn.Module):
    """Ranks use different parameters of it."""

    def __init__(self) -> None:
        super().__init__()
        self.paths = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.split(4)  # the unsharded model does what all ranks do
        first = dist.get_rank() if len(parts) == 1 else 0
        return torch.cat([self.paths[(first + i) % 2](part) for i, part in enumerate(parts)])


def experts(engine: Engine) -> list[Any]:
    model = engine.shard(stack(Expert, 2))
    if engine.is_sharded:
        model.set_reduce_scatter_unused_params(True)
    loss_of(model(engine.part(inputs(1)[0]))).backward()
    found = gradients(model)
    unused = {n: found.pop(n) for n in list(found) if ".paths.2." in n}
    # Torch gives zeros to parameters that no rank has used.
    assert not engine.is_sharded or all(not g.full_tensor().any() for g in unused.values())
    return [found]


@ranks(2)
def test_parameters_that_some_ranks_do_not_use() -> None:
    check_engines_agree(experts)


@ranks(2)
@pytest.mark.parametrize("recurse", [True, False])
def test_unused_parameters_get_zeros_where_asked(recurse: bool) -> None:
    def scenario(engine: Engine) -> list[Any]:
        model = engine.shard(stack(Unused, 1))
        model.set_reduce_scatter_unused_params(True, recurse=recurse)
        loss_of(model(engine.part(inputs(1)[0]))).backward()
        return [gradients(model)]

    check_engines_agree(scenario, plain=False)


class Unused(nn.Module):
    """Has a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = mlp(), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)
