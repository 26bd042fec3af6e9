"""A compiled sharded model under setters that change how gradients are reduced: as the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh

from harness import ranks
from oracle import batches, build, full, loss_of, shard
from shoal.fsdp import MixedPrecisionPolicy, fully_shard
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole

LAYOUTS: list[Layout] = [Even(), Flat(), Rows(), Block(5), Whole()]

Set = Callable[[Any, int], None]
"""Calls setters of a model before one of the micro-batches."""


def trained(model: Any, sets: Set, *, compiles: bool, every: int, **options: Any) -> list[Any]:
    """Losses of micro-batches, which gradients there are after each, gradients and parameters."""
    torch._dynamo.reset()
    run: Any = (
        torch.compile(model, backend="shoal", fullgraph=True, **options) if compiles else model
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[Any] = []
    data = batches(2 * every, dist.get_rank(), dist.get_world_size())
    for index, (_, part) in enumerate(data):
        sets(model, index % every)
        loss = loss_of(run, part)
        loss.backward()
        seen += [loss.detach(), *(p.grad is not None for p in model.parameters())]
        if index % every == every - 1:
            seen += [full(p.grad) for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    return [*seen, *(full(p.detach()) for p in model.parameters())]


def check(make: Callable[[], Any], sets: Set, *, every: int = 3, **options: Any) -> None:
    compiled = trained(make(), sets, compiles=True, every=every, **options)
    eager = trained(make(), sets, compiles=False, every=every)
    assert len(compiled) == len(eager)
    for a, b in zip(compiled, eager, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a is b


def syncs_last(model: Any, micro_batch: int) -> None:
    model.set_requires_gradient_sync(micro_batch == 2)


@ranks(2, 4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_gradients_wait_for_the_last_micro_batch(layout: Layout) -> None:
    check(lambda: shard(build(), layout=layout), syncs_last)


@ranks(2)
@pytest.mark.parametrize("layout", [Even(), Flat()], ids=repr)
@pytest.mark.parametrize("reduce_dtype", [torch.float32, None])
def test_in_mixed_precision(layout: Layout, reduce_dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)

    def run(*, compiles: bool) -> list[Any]:
        model: Any = shard(build(), layout=layout, mp_policy=policy)
        return trained(model, syncs_last, compiles=compiles, every=3)

    for a, b in zip(run(compiles=True), run(compiles=False), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)


@ranks(2)
def test_by_inductor() -> None:
    losses = [
        trained(shard(build()), syncs_last, compiles=compiles, every=3, **options)
        for compiles, options in ((True, {"options": {"inner": "inductor"}}), (False, {}))
    ]
    for a, b in zip(*losses, strict=True):
        torch.testing.assert_close(a, b)


@ranks(4)
@pytest.mark.parametrize("layout", [Even(), Flat()], ids=repr)
def test_partial_sums_wait_for_the_replicas(layout: Layout) -> None:
    """Reduced over shards each time, over replicas once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def sets(model: Any, micro_batch: int) -> None:
        model.set_requires_all_reduce(micro_batch == 2)

    check(lambda: shard(build(), layout=layout, mesh=mesh), sets)


def with_factor(model: Any, micro_batch: int) -> None:
    model.set_gradient_divide_factor(3.0 + micro_batch)


def with_sums(model: Any, _: int) -> None:
    model.set_force_sum_reduction_for_comms(True)


def with_unused(model: Any, _: int) -> None:
    model.set_reduce_scatter_unused_params(True)


def with_hook(model: Any, _: int) -> None:
    model.set_all_reduce_hook(lambda grad: grad.mul_(0.5))


@ranks(2)
@pytest.mark.parametrize("sets", [with_factor, with_sums, with_unused, with_hook])
def test_other_setters_hold(sets: Set) -> None:
    check(lambda: shard(build()), sets)


@ranks(2)
def test_some_units_wait() -> None:
    def sets(model: Any, micro_batch: int) -> None:
        model.blocks[1].set_requires_gradient_sync(micro_batch == 2)

    check(lambda: shard(build()), sets)


@ranks(2)
def test_switching_compiles_two_graphs() -> None:
    """One that reduces, one that does not: whatever is set, and however often."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("shoal")
    model: Any = shard(build())
    factors = iter(range(2, 100))

    class Counted:  # named as the backend is, so that units are captured
        __name__ = "shoal"

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return counter(*args, **kwargs)

    run: Any = torch.compile(model, backend=Counted(), fullgraph=True)
    for _, part in batches(4, dist.get_rank(), dist.get_world_size()):
        loss_of(run, part).backward()
        for syncs in (False, False, True):
            model.set_requires_gradient_sync(syncs)
            model.set_gradient_divide_factor(float(next(factors)))
            loss_of(run, part).backward()
        model.set_gradient_divide_factor(None)
        model.zero_grad()
    assert counter.frame_count == 2


def two_losses(model: Any, run: Any, parts: Sequence[torch.Tensor], sets: str) -> list[Any]:
    """Two forwards, then their backwards, with the setter called at one moment or another."""
    model.zero_grad()
    model.set_requires_gradient_sync(sets != "waits, then reduces")
    first = loss_of(run, parts[0])
    if sets == "reduces, then waits":
        model.set_requires_gradient_sync(False)
    second = loss_of(run, parts[1])
    second.backward()
    model.set_requires_gradient_sync(True)
    first.backward()
    return [full(p.grad) for p in model.parameters()]


@ranks(2)
@pytest.mark.parametrize("sets", ["waits, then reduces", "reduces, then waits"])
def test_setters_between_forward_and_backward(sets: str) -> None:
    """No gradient is lost, wherever the setter is called."""
    torch._dynamo.reset()
    parts = [part for _, part in batches(2, dist.get_rank(), dist.get_world_size())]
    one, other = shard(build()), shard(build())
    run: Any = torch.compile(one, backend="shoal", fullgraph=True)
    for _ in range(2):
        ours, theirs = two_losses(one, run, parts, sets), two_losses(other, other, parts, sets)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


@ranks(2)
def test_eager_and_compiled_micro_batches_mix() -> None:
    torch._dynamo.reset()
    models: list[Any] = [shard(build()), shard(build())]
    run: Any = torch.compile(models[0], backend="shoal", fullgraph=True)
    for index, (_, part) in enumerate(batches(4, dist.get_rank(), dist.get_world_size())):
        for model in models:
            model.set_requires_gradient_sync(index == 3)
        loss_of(run if index % 2 else models[0], part).backward()
        loss_of(models[1], part).backward()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(full(a.grad), full(b.grad))


@ranks(2)
def test_frozen_while_gradients_wait() -> None:
    torch._dynamo.reset()
    models: list[Any] = [shard(build()), shard(build())]
    run: Any = torch.compile(models[0], backend="shoal", fullgraph=True)
    for index, (_, part) in enumerate(batches(2, dist.get_rank(), dist.get_world_size())):
        for model in models:
            model.set_requires_gradient_sync(index == 1)
            model.blocks[0].up.weight.requires_grad_(index == 0)
        loss_of(run, part).backward()
        loss_of(models[1], part).backward()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(full(a.grad), full(b.grad))


@ranks(2)
def test_an_own_all_gather_is_refused_by_name() -> None:
    class Gather:
        def allocate(self, size: Any, *, dtype: Any, device: Any) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output: Any, given: Any, group: Any, async_op: bool = False) -> Any:
            return dist.all_gather_into_tensor(output, given, group, async_op)

    model: Any = fully_shard(nn.Linear(4, 4))
    torch._dynamo.reset()
    run: Any = torch.compile(model, backend="shoal", fullgraph=True)
    run(torch.ones(2, 4)).sum().backward()
    model.set_custom_all_gather(Gather())
    with pytest.raises(Exception, match="set_custom_all_gather"):
        run(torch.ones(2, 4))
