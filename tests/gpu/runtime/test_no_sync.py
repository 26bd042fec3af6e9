"""A training step never makes the host wait for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from gpu.runtime.conftest import Join
from shoal._torch import cuda
from shoal.comm.modelled import Network
from shoal.fsdp import MixedPrecisionPolicy, fully_shard
from shoal.layout import Even, Flat, Whole

# Torch remarks that its switch does not know of everything that synchronises.
pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode")

DIM = 64
SOME = Network("some", 100.0, 20.0)
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
HOLD_S = 0.15
"""How long the device is held up; the host launches a step in a small part of that."""


class Block(nn.Module):
    """Rows that divide no world size."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM + 1)
        self.down = nn.Linear(2 * DIM + 1, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(DIM, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


def sharded(**options: Any) -> Any:
    model = Model().cuda()
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def step_of(model: nn.Module, num_backwards: int = 1) -> Callable[[], None]:
    """A training step; nobody reads the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(8, DIM, device="cuda")

    def step() -> None:
        for _ in range(num_backwards):
            model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Let torch refuse whatever it knows to synchronise."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def hold() -> torch.Event:
    """Keep the current stream, and all that wait for it, from going on."""
    cuda.spin(HOLD_S * 1e6)
    return torch.cuda.current_stream().record_event()


def check_host_runs_ahead(step: Callable[[], None]) -> None:
    """Neither refused by torch, nor (what torch does not know of) late."""
    for _ in range(3):
        step()
    hold()
    step()  # held up too: pinned memory for kernels' arguments is there from now on
    torch.cuda.synchronize()
    with no_synchronisation():
        held = hold()
        start = time.perf_counter()
        step()
        launched_s = time.perf_counter() - start
    assert not held.query(), f"the host was held up for {launched_s:.3f} s"
    torch.cuda.synchronize()


def test_this_would_notice(join: Join) -> None:
    """Torch's switch, and the held-up device for what the switch does not see."""
    join(SOME)
    step = step_of(sharded())

    def reading() -> None:
        step()
        torch.cuda.current_stream().record_event().synchronize()

    with pytest.raises((AssertionError, RuntimeError), match=r"held up|synchroniz"):
        check_host_runs_ahead(reading)
    with pytest.raises(RuntimeError, match="synchroniz"), no_synchronisation():
        torch.ones(1, device="cuda").item()


@pytest.mark.parametrize("layout", [Even(), Flat(), Whole()], ids=repr)
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), HALF], ids=["fp32", "bf16"])
def test_a_replayed_step(join: Join, layout: Any, policy: MixedPrecisionPolicy) -> None:
    join(SOME)
    check_host_runs_ahead(step_of(sharded(layout=layout, mp_policy=policy)))


def test_reductions_in_several_steps(join: Join) -> None:
    join(SOME)
    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
    check_host_runs_ahead(step_of(sharded(mesh=mesh, mp_policy=HALF)))


def test_gradients_that_add_up(join: Join) -> None:
    join(SOME)
    check_host_runs_ahead(step_of(sharded(mp_policy=HALF), num_backwards=2))


def test_resharding_to_fewer_ranks(join: Join) -> None:
    join(SOME)
    check_host_runs_ahead(step_of(sharded(reshard_after_forward=2)))


def test_gradient_clipping(join: Join) -> None:
    """Clipping reads no number on the host either."""
    join(SOME)
    model = sharded(layout=Flat())
    x = torch.randn(8, DIM, device="cuda")

    def step() -> None:
        model.zero_grad()
        model(x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    check_host_runs_ahead(step)
