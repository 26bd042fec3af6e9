"""torch's own communication hooks on replicated modules, beside torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from harness import ranks
from replicas import batch, pair, train
from shoal import replicate
from shoal.errors import InvariantError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore")

HOOKS = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "wrapped": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
}


@ranks(2)
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_torch(name):
    for as_views in (False, True):
        ours, theirs = pair(gradient_as_bucket_view=as_views)
        for model in (ours, theirs):
            model.register_comm_hook(None, HOOKS[name])
        train(ours, theirs)


@ranks(2)
def test_bf16_compression():
    """Against fp32 averages: torch refuses this hook on CPU."""
    ours, theirs = pair()
    ours.register_comm_hook(None, default_hooks.bf16_compress_hook)
    for number in range(3):
        for model in (ours, theirs):
            model.zero_grad()
            model(batch(number)).pow(2).mean().backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, atol=0.02, rtol=0.02)
    assert not torch.equal(ours.last.weight.grad, theirs.module.last.weight.grad)


def group_of_two_threads() -> Any:
    """PowerSGD waits for one all-reduce in the callback of another, on a thread of the group."""
    gloo: Any = dist.ProcessGroupGloo
    make = gloo.__init__

    def make_with_two(self: Any, store: Any, rank: int, size: int, timeout: Any) -> None:
        options = gloo._Options()
        options._threads, options._timeout = 2, timeout
        options._devices = [gloo.create_default_device()]
        make(self, store, rank, size, options)

    gloo.__init__ = make_with_two
    try:
        return dist.new_group()
    finally:
        gloo.__init__ = make


def power_sgd() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(
        group_of_two_threads(),
        matrix_approximation_rank=1,
        start_powerSGD_iter=2,
        min_compression_rate=0.5,
    )


@ranks(2)
def test_power_sgd():
    ours, theirs = pair(small=False)
    for model in (ours, theirs):
        model.register_comm_hook(power_sgd(), powerSGD_hook.powerSGD_hook)
    train(ours, theirs, num_steps=5)


@ranks(2)
def test_power_sgd_of_several_buckets():
    """Beside nothing of torch's: on gloo, its threads wait for each other here."""
    model, _ = pair()
    model.register_comm_hook(power_sgd(), powerSGD_hook.powerSGD_hook)
    for number in range(6):
        model.zero_grad()
        model(batch(number)).pow(2).mean().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                both = [torch.empty_like(parameter.grad) for _ in range(2)]
                dist.all_gather(both, parameter.grad)
                torch.testing.assert_close(*both)


@ranks(2)
def test_what_a_hook_sees():
    seen: list[tuple[int, bool, int, int]] = []

    def hook(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        numel = sum(gradient.numel() for gradient in bucket.gradients())
        seen.append((bucket.index(), bucket.is_last(), bucket.buffer().numel(), numel))
        bucket.set_buffer(torch.full_like(bucket.buffer(), state))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = replicate(nn.Linear(5, 3), bucket_cap_mb=1e-6, first_bucket_mb=1e-6)
    model.register_comm_hook(7.0, hook)
    for _ in range(2):
        model(batch(0)).sum().backward()
    assert [entry[:2] for entry in seen] == [(0, True), (0, False), (1, True)]
    assert all(entry[2] == entry[3] for entry in seen)
    assert model.weight.grad is not None
    assert bool((model.weight.grad == 7).all())


@ranks(2)
def test_hooks_that_cannot_work_are_refused():
    model = replicate(nn.Linear(5, 3))
    with pytest.raises(UsageError, match="callable"):
        model.register_comm_hook(None, 3)
    model.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    with pytest.raises(InvariantError, match="before on this module"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(UsageError, match=r"must return a torch\.futures\.Future"):
        model(batch(0)).sum().backward()
    dist.barrier()
