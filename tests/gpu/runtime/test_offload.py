"""Shards, gradients and optimizer state in host memory, computed on the GPU by NCCL ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from differential import PLAIN, SHOAL, Engine, check_engines_agree, gradients
from gpu.runtime.steps import DEVICE, EPS, model_for, train
from harness import nccl_ranks
from oracle import batches, loss_of
from shoal._torch.distributed_tensor import local_tensor
from shoal.layout import Flat, Layout, Whole
from shoal.offload import step_in_backward
from shoal.tensor.sharded import ShardedTensor

HALF = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
NARROW = {"param_dtype": torch.bfloat16}
"""Gradients come to the host in another dtype than the parameters are in there."""


def offloaded(engine: Engine, pin_memory: bool, **options: Any) -> Any:
    """The model with its shards on the host; the unsharded one stays on the GPU."""
    if engine.is_sharded:
        options["offload_policy"] = engine.api.CPUOffloadPolicy(pin_memory=pin_memory)
    return model_for(engine, **options)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.local if isinstance(tensor, ShardedTensor) else local_tensor(tensor)


def places(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Where this rank's part of everything lives."""
    parameters = dict(model.named_parameters())
    assert all(p.grad is not None for p in parameters.values())
    state = {name: optimizer.state[p]["exp_avg"] for name, p in parameters.items()}
    return [
        {name: local(p).device.type for name, p in parameters.items()},
        {name: local(p.grad).device.type for name, p in parameters.items() if p.grad is not None},
        {name: local(moment).device.type for name, moment in state.items()},
        {name: local(p).is_pinned() for name, p in parameters.items() if local(p).numel()},
    ]


@nccl_ranks(2)
@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("dtypes", [None, HALF, NARROW], ids=["precise", "half", "narrow"])
def test_equal_to_torch(pin_memory: bool, dtypes: dict[str, torch.dtype] | None) -> None:
    check_engines_agree(
        lambda engine: train(engine, offloaded(engine, pin_memory, dtypes=dtypes)), plain=False
    )


@nccl_ranks(2)
@pytest.mark.parametrize("pin_memory", [True, False])
def test_gradients_that_add_up_on_the_host(pin_memory: bool) -> None:
    """The second backward's come to a `.grad` that is there, some after several backwards."""

    def scenario(engine: Engine) -> list[Any]:
        model = offloaded(engine, pin_memory)
        seen: list[Any] = []
        for index, (_, part) in enumerate(batches(4, dist.get_rank(), 2, DEVICE)):
            model.set_requires_gradient_sync(index != 1)
            loss_of(model, part).backward()
            if index != 1:
                seen.append(gradients(model))
        return seen

    check_engines_agree(scenario, plain=False)


@nccl_ranks(2)
@pytest.mark.parametrize("pin_memory", [True, False])
def test_everything_lives_on_the_host(pin_memory: bool) -> None:
    def scenario(engine: Engine) -> list[Any]:
        model = offloaded(engine, pin_memory)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ((_, part),) = batches(1, dist.get_rank(), 2, DEVICE)
        loss_of(model, part).backward()
        optimizer.step()
        found = places(model, optimizer)
        assert all(set(of_kind.values()) == {"cpu"} for of_kind in found[:3])
        assert set(found[3].values()) == {pin_memory}
        return found

    check_engines_agree(scenario, plain=False)


@nccl_ranks(2)
@pytest.mark.parametrize("layout", [None, Flat(), Whole()], ids=repr)
def test_equal_to_the_unsharded_model(layout: Layout | None) -> None:
    plain = model_for(PLAIN)
    sharded = offloaded(SHOAL, True, **({} if layout is None else {"layout": layout}))
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=1e-2, eps=EPS, fused=True) for m in (plain, sharded)
    ]
    for whole, part in batches(3, dist.get_rank(), 2, DEVICE):
        losses = [loss_of(plain, whole), loss_of(sharded, part)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(SHOAL.mean(losses[1]), losses[0].detach())
    # The next forward gathers what the host's optimizer has written.
    with torch.no_grad():
        ((whole, _),) = batches(1, 0, 2, DEVICE)
        torch.testing.assert_close(loss_of(sharded, whole), loss_of(plain, whole))


@nccl_ranks(2)
def test_an_optimizer_inside_backward_reads_gradients_that_have_arrived() -> None:
    plain, sharded = model_for(PLAIN), offloaded(SHOAL, True)
    for parameter in (*plain.parameters(), *sharded.parameters()):
        parameter.register_post_accumulate_grad_hook(_descend)
    for whole, part in batches(3, dist.get_rank(), 2, DEVICE):
        expected, loss = loss_of(plain, whole), loss_of(sharded, part)
        expected.backward()
        loss.backward()
        torch.testing.assert_close(SHOAL.mean(loss), expected.detach())


def _descend(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.5)
    parameter.grad = None


@nccl_ranks(2)
@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("dtypes", [None, HALF], ids=["precise", "half"])
def test_steps_beside_backward_are_those_at_the_end(
    pin_memory: bool, dtypes: dict[str, torch.dtype] | None
) -> None:
    models = [offloaded(SHOAL, pin_memory, dtypes=dtypes) for _ in range(2)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in models]
    step_in_backward(models[1], optimizers[1], threads=2)
    for _, part in batches(4, dist.get_rank(), 2, DEVICE):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(model, part).backward()
            optimizer.step()
            optimizer.zero_grad()
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(local(p), local(q))


@nccl_ranks(2)
def test_copies_run_beside_gathers_and_are_given_back() -> None:
    """After a step the device holds what it held before it: no copy stays."""
    model = offloaded(SHOAL, True)
    held: list[int] = []
    for _, part in batches(4, dist.get_rank(), 2, DEVICE):
        loss_of(model, part).backward()
        model.zero_grad()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert len(set(held[1:])) == 1, held
