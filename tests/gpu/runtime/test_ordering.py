"""Nothing is read before it is there, nor overwritten while it is read.

The same training at different paces: a slow network, slow compute, and a run in which the device
is waited for after every block. All the while compute writes over whatever memory the allocator
hands it. Where a wait between streams is missing, the numbers part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from collectives import SynchronousGather, SynchronousReduce
from gpu.runtime.conftest import Join
from shoal._torch import cuda, distributed_tensor
from shoal.comm.modelled import FREE, Network
from shoal.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from shoal.layout import Even, Flat, Whole
from shoal.tensor.sharded import ShardedTensor

DIM = 64
NUM_STEPS = 3
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast compute and network are."""

    network: Network = FREE
    compute_us: float = 0.0
    waits: bool = False
    """Whether the host waits for the device again and again."""

    def strain(self) -> None:
        """Let time pass on the current stream, and write over memory that is free."""
        if self.waits:
            torch.cuda.synchronize()
        elif self.compute_us > 0:
            cuda.spin(self.compute_us)
        # As large as a unit's parameters, their half precision, a shard: all at once, since the
        # allocator hands out the same memory again and again otherwise.
        sizes = [17_000, 17_000, 8_500, 8_500, 2_100, 2_100, 1_050]
        junk = [torch.full((size,), 1e9, device="cuda") for size in sizes]
        del junk


CAREFUL = Pace(waits=True)
PACES = {
    "slow network": Pace(network=Network("slow", None, 2000.0)),
    "slow compute": Pace(compute_us=2000.0),
}


class Strain(torch.autograd.Function):
    """Strains forward and backward, and gives values through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pace: Pace) -> torch.Tensor:
        ctx.pace = pace
        pace.strain()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore
        ctx.pace.strain()
        return grad.clone(), None


class Block(nn.Module):
    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM + 1)
        self.down = nn.Linear(2 * DIM + 1, DIM)
        self.pace = pace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: Any = Strain.apply(torch.relu(self.up(x)), self.pace)
        return Strain.apply(x + self.down(hidden), self.pace)  # pyright: ignore


class Model(nn.Module):
    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(pace) for _ in range(3))
        self.head = nn.Linear(DIM, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


def sharded(pace: Pace, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Model(pace).cuda()
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def two_axes(pace: Pace) -> nn.Module:
    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
    return sharded(pace, mesh=mesh, mp_policy=HALF)


def summing(pace: Pace) -> nn.Module:
    model = sharded(pace, mp_policy=HALF)
    for module in (model, *model.blocks):
        module.set_force_sum_reduction_for_comms(True)
    return model


def own_collectives(pace: Pace) -> nn.Module:
    model = sharded(pace, mp_policy=HALF)
    for module in (model, *model.blocks):
        module.set_custom_all_gather(SynchronousGather())
        module.set_custom_reduce_scatter(SynchronousReduce())
    return model


def hooked(pace: Pace) -> nn.Module:
    """A hook that changes every reduced gradient on a stream of the user's."""
    model, stream = sharded(pace), torch.cuda.Stream()
    for module in (model, *model.blocks):
        module.set_all_reduce_hook(lambda grad: grad.mul_(0.5), stream=stream)
    return model


MODELS: dict[str, Callable[[Pace], nn.Module]] = {
    "even": lambda pace: sharded(pace, layout=Even()),
    "even in bf16": lambda pace: sharded(pace, layout=Even(), mp_policy=HALF),
    "flat": lambda pace: sharded(pace, layout=Flat()),
    "flat in bf16": lambda pace: sharded(pace, layout=Flat(), mp_policy=HALF),
    "whole in bf16": lambda pace: sharded(pace, layout=Whole(), mp_policy=HALF),
    "kept": lambda pace: sharded(pace, reshard_after_forward=False, mp_policy=HALF),
    "fewer ranks": lambda pace: sharded(pace, reshard_after_forward=2, mp_policy=HALF),
    "on the host": lambda pace: sharded(pace, offload_policy=CPUOffloadPolicy(), mp_policy=HALF),
    "two axes": two_axes,
    "summing": summing,
    "own collectives": own_collectives,
    "hooked": hooked,
}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.local
        if isinstance(tensor, ShardedTensor)
        else distributed_tensor.local_tensor(tensor)
    )


def train(
    model: Any,
    pace: Pace,
    *,
    every: int = 1,
    replicas_wait: bool = False,
    marks_updates: bool = False,
) -> list[torch.Tensor]:
    """Losses, and this rank's parameters in the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(8, DIM, generator=torch.Generator().manual_seed(1)).cuda()
    losses: list[torch.Tensor] = []
    for step in range(NUM_STEPS * every):
        is_last = step % every == every - 1
        if replicas_wait:
            model.set_requires_all_reduce(is_last)
        if marks_updates:
            pace.strain()  # between the optimizer's event and the forward that waits for it
        loss = model(x)
        loss.backward()
        losses.append(loss.detach())
        if is_last:
            optimizer.step()
            if marks_updates:
                model.set_post_optim_event(torch.cuda.current_stream().record_event())
            optimizer.zero_grad()
    torch.cuda.synchronize()
    return [*losses, *(local(p).detach() for p in model.parameters())]


def check_every_pace(join: Join, make: Callable[[Pace], nn.Module], **options: Any) -> None:
    results: dict[str, list[torch.Tensor]] = {}
    for name, pace in {"careful": CAREFUL, **PACES}.items():
        join(pace.network)
        results[name] = train(make(pace), pace, **options)
    expected = results.pop("careful")
    assert all(torch.isfinite(tensor).all() for tensor in expected)
    num_losses = NUM_STEPS * options.get("every", 1)
    assert expected[num_losses - 1] < expected[0], "nothing was learned"
    for name, found in results.items():
        for index, (tensor, wanted) in enumerate(zip(found, expected, strict=True)):
            torch.testing.assert_close(
                tensor, wanted, msg=lambda m, n=name, i=index: f"{n}: result {i}: {m}"
            )


@pytest.mark.parametrize("name", MODELS)
def test_the_pace_changes_no_number(join: Join, name: str) -> None:
    check_every_pace(join, MODELS[name])


def test_gradients_that_add_up(join: Join) -> None:
    check_every_pace(join, lambda pace: sharded(pace, mp_policy=HALF), every=2)


def test_replicas_that_wait_for_the_last_backward(join: Join) -> None:
    """What the others have reduced already is kept, and read beside compute later."""
    check_every_pace(join, two_axes, every=3, replicas_wait=True)


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), HALF], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", [Even(), Flat()], ids=repr)
def test_gathers_that_wait_for_the_optimizer_only(
    join: Join, layout: Any, policy: MixedPrecisionPolicy
) -> None:
    """They may start before what compute was given since, so they may not use its memory."""
    check_every_pace(
        join, lambda pace: sharded(pace, layout=layout, mp_policy=policy), marks_updates=True
    )
