"""Steps beside backward are those of an optimizer at the end, to the bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shoal.optim
from harness import ranks
from oracle import build, full, loss_of, shard
from shoal.errors import InvariantError, UsageError
from shoal.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy
from shoal.layout import Block, Flat, Layout, Rows, Whole
from shoal.offload import step_in_backward

OFFLOAD = CPUOffloadPolicy(pin_memory=False)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "shoal adamw": lambda parameters: shoal.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
}


def batch_of(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(11, (4, 5), generator=generator)


def train(model: nn.Module, optimizer: Any, num_steps: int, scheduler: Any = None) -> None:
    for step in range(num_steps):
        loss_of(model, batch_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def check_equal(models: list[Any], optimizers: list[Any]) -> None:
    for (name, p), (_, q) in zip(*(model.named_parameters() for model in models), strict=True):
        assert torch.equal(full(p.detach()), full(q.detach())), name
    states = [one.state_dict()["state"] for one in optimizers]
    assert states[0].keys() == states[1].keys()
    for index, state in states[0].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(full(value), full(states[1][index][key])), key


@pytest.mark.compose("scheduled offload", "fully_shard", "Even")
@ranks(2, 4)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_is_the_step_at_the_end_to_the_bit(kind: str) -> None:
    models: list[Any] = [shard(build(), offload_policy=OFFLOAD) for _ in range(2)]
    optimizers = [OPTIMIZERS[kind](model.parameters()) for model in models]
    steps = step_in_backward(models[1], optimizers[1], threads=2)
    for model, optimizer in zip(models, optimizers, strict=True):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        train(model, optimizer, 4, scheduler)
    check_equal(models, optimizers)
    for optimizer in optimizers:  # a state dict takes the place of all states and groups
        optimizer.load_state_dict(optimizer.state_dict())
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 2)
    check_equal(models, optimizers)
    steps.remove()
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 2)
    check_equal(models, optimizers)


LAYOUTS: list[Layout] = [Flat(), Rows(), Block(5), Whole()]


@pytest.mark.compose("scheduled offload", "Flat", "Rows", "Block", "Whole")
@ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("precise", [False, True])
def test_on_every_layout(layout: Layout, precise: bool) -> None:
    dtypes = {} if precise else {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    policy = MixedPrecisionPolicy(**dtypes)
    models: list[Any] = [
        shard(build(), offload_policy=OFFLOAD, layout=layout, mp_policy=policy) for _ in range(2)
    ]
    optimizers = [OPTIMIZERS["fused adamw"](model.parameters()) for model in models]
    step_in_backward(models[1], optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 3)
    check_equal(models, optimizers)


@pytest.mark.compose("scheduled offload", "HSDP")
@ranks(4)
def test_on_two_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    models: list[Any] = [shard(build(), offload_policy=OFFLOAD, mesh=mesh) for _ in range(2)]
    optimizers = [OPTIMIZERS["adamw"](model.parameters()) for model in models]
    step_in_backward(models[1], optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 3)
    check_equal(models, optimizers)


@pytest.mark.compose("scheduled offload", "wrapper")
@ranks(2)
def test_in_the_wrapper() -> None:
    models: list[Any] = []
    for _ in range(2):
        model: Any = build()
        for index, block in enumerate(model.blocks):
            model.blocks[index] = FullyShardedDataParallel(block, use_orig_params=True)
        models.append(FullyShardedDataParallel(model, use_orig_params=True))
    optimizers = [OPTIMIZERS["adamw"](model.parameters()) for model in models]
    step_in_backward(models[1], optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 3)
    found = [model.state_dict() for model in models]
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


@ranks(2)
def test_units_are_stepped_on_threads_before_backward_is_over() -> None:
    model: Any = shard(build(), offload_policy=OFFLOAD)
    seen: list[tuple[str, int]] = []

    class Seen(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            num = sum(p.grad is not None for group in self.param_groups for p in group["params"])
            seen.append((threading.current_thread().name, num))
            return super().step(closure)

    optimizer = Seen(model.parameters(), lr=0.1)
    step_in_backward(model, optimizer)
    loss_of(model, batch_of(0)).backward()
    first = model.blocks[2].up.weight
    assert first.grad is None or len(seen) < 4, "gradients are dropped as units are stepped"
    optimizer.step()
    names = [name for name, _ in seen]
    assert len(seen) == 5, "four units, and the call at the end"
    assert all(name.startswith("shoal-step") for name in names[:4])
    assert names[4] == threading.main_thread().name or not names[4].startswith("shoal-step")
    assert seen[4][1] == 0, "which finds nothing left to do"
    assert all(parameter.grad is None for parameter in model.parameters())


@ranks(2)
def test_accumulation_without_reduction_is_one_step() -> None:
    models: list[Any] = [shard(build(), offload_policy=OFFLOAD) for _ in range(2)]
    optimizers = [OPTIMIZERS["adamw"](model.parameters()) for model in models]
    step_in_backward(models[1], optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        for number in range(6):
            model.set_requires_gradient_sync(number % 3 == 2)
            loss_of(model, batch_of(number)).backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    check_equal(models, optimizers)


@ranks(2)
def test_a_second_reduction_before_the_step_is_refused() -> None:
    model: Any = shard(build(), offload_policy=OFFLOAD)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step_in_backward(model, optimizer)
    loss_of(model, batch_of(0)).backward()
    with pytest.raises(InvariantError, match=r"gradients a second time before optimizer\.step"):
        loss_of(model, batch_of(1)).backward()
    optimizer.step()


@ranks(2)
def test_parameters_outside_of_units_are_stepped_at_the_end() -> None:
    models: list[Any] = []
    for _ in range(2):
        model: Any = build()
        for block in model.blocks:
            shard_one(block)
        models.append(model)
    optimizers = [OPTIMIZERS["adamw"](model.parameters()) for model in models]
    step_in_backward(models[1], optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 3)
    check_equal(models, optimizers)


def shard_one(module: nn.Module) -> None:
    from shoal import fully_shard

    fully_shard(module, offload_policy=OFFLOAD)


@ranks(2)
def test_an_error_on_a_thread_is_raised_by_the_step() -> None:
    model: Any = shard(build(), offload_policy=OFFLOAD)

    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if threading.current_thread().name.startswith("shoal-step"):
                raise ArithmeticError("no step today")
            return super().step(closure)

    optimizer = Broken(model.parameters(), lr=0.1)
    step_in_backward(model, optimizer)
    loss_of(model, batch_of(0)).backward()
    with pytest.raises(ArithmeticError, match="no step today"):
        optimizer.step()


@ranks(2)
def test_wrong_arguments_are_refused() -> None:
    model: Any = shard(build(), offload_policy=OFFLOAD)
    adamw = OPTIMIZERS["adamw"]
    with pytest.raises(UsageError, match="threads of 1 or more, got 0"):
        step_in_backward(model, adamw(model.parameters()), threads=0)
    with pytest.raises(NotImplementedError, match="LBFGS, which may look across elements"):
        step_in_backward(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(UsageError, match="holds no parameter of a unit"):
        step_in_backward(model, adamw(build().parameters()))
    step_in_backward(model, adamw(model.parameters()))
    with pytest.raises(InvariantError, match="stepped in backward already"):
        step_in_backward(model, adamw(model.parameters()))
