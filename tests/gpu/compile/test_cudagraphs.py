"""Inductor's CUDA graphs of what `torch.compile(backend="shoal")` gives it: the same training."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shoal.compile  # noqa: F401 - so that torch knows the backend in a source folder
from gpu.runtime.steps import EPS
from harness import nccl_ranks
from oracle import batches, build, full, loss_of, shard
from shoal import compile_step
from shoal.comm.modelled import FREE, NVLINK, Network, init_modelled
from shoal.layout import Even, Flat, Layout
from shoal.runtime.policy import MixedPrecisionPolicy

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    # Inductor advises on TF32 by a warning, and Dynamo looks at the gradient of what it traces.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

NUM_STEPS = 20
OPTIONS = {"inner": "inductor", "cudagraphs": True, "cache": False}
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture
def alone() -> Iterator[Callable[..., None]]:
    """Be rank 0 of two on a modelled network, whose other rank is a clone."""

    def join(network: Network = FREE) -> None:
        init_modelled(2, network, "cuda")

    yield join
    forget()
    if dist.is_initialized():
        dist.destroy_process_group()


def forget() -> None:
    """Drop recordings before the group goes that they send through."""
    from torch._inductor import cudagraph_trees

    torch.cuda.synchronize()
    torch._dynamo.reset()
    cudagraph_trees.reset_cudagraph_trees()
    gc.collect()


def trained(model: nn.Module, run: nn.Module, num_steps: int = NUM_STEPS) -> list[torch.Tensor]:
    """Losses, the gradients of the last step, and parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    seen: list[torch.Tensor] = []
    for index, (_, part) in enumerate(batches(num_steps, rank, size, "cuda")):
        torch.compiler.cudagraph_mark_step_begin()
        loss = loss_of(run, part)
        loss.backward()
        seen.append(loss.detach().clone())
        if index == num_steps - 1:
            seen += [full(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(full(p.detach()) for p in model.parameters())]


def recorded(model: nn.Module) -> nn.Module:
    """The model with CUDA graphs of it."""
    torch._dynamo.reset()
    return torch.compile(model, backend="shoal", fullgraph=True, options=OPTIONS)  # type: ignore[return-value]


def check_same(ours: list[torch.Tensor], theirs: list[torch.Tensor], tolerance: float) -> None:
    assert len(ours) == len(theirs)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(
            a, b, rtol=tolerance, atol=tolerance, msg=lambda m, n=number: f"{n}: {m}"
        )


def launches(step: Callable[[], Any]) -> Counter[str]:
    """What a step calls of CUDA."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    return Counter(event.name for event in profile.events() or ())


def check_replayed(model: nn.Module, run: nn.Module) -> None:
    """Forward is one launch, backward another, and no kernel of a model is launched beside them."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    (_, part), *_ = batches(1, rank, size, "cuda")

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        loss_of(run, part).backward()

    for _ in range(4):
        step()
        model.zero_grad()
    found = launches(step)
    model.zero_grad()
    assert found["cudaGraphLaunch"] == 2, found
    assert found["aten::mm"] == found["aten::addmm"] == 0, found


def test_an_unsharded_model() -> None:
    ours, theirs = build(device="cuda"), build(device="cuda")
    run = recorded(ours)
    check_same(trained(ours, run), trained(theirs, theirs), 1e-3)
    check_replayed(ours, run)


def test_weights_changed_in_place_are_seen() -> None:
    """They are read where they are: a recording that had copied them would not know."""
    model = build(device="cuda")
    run = recorded(model)
    trained(model, run, num_steps=5)
    (_, part), *_ = batches(1, 0, 1, "cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    torch.compiler.cudagraph_mark_step_begin()
    torch.testing.assert_close(loss_of(run, part), loss_of(model, part), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("network", [FREE, NVLINK], ids=lambda one: one.name)
@pytest.mark.parametrize("layout", [Even(), Flat()], ids=repr)
def test_a_sharded_model_on_a_modelled_network(
    alone: Callable[..., None], layout: Layout, network: Network
) -> None:
    alone(network)
    ours, theirs = (shard(build(device="cuda"), layout=layout) for _ in range(2))
    run = recorded(ours)
    check_same(trained(ours, run), trained(theirs, theirs), 1e-3)
    check_replayed(ours, run)


def test_mixed_precision_on_a_modelled_network(alone: Callable[..., None]) -> None:
    """With eager's roundings: fused kernels keep more bits, and ReLUs at their kink then differ.

    Whole tensors are compared, not elements: sums that cancel keep few of bf16's eight bits.
    """
    alone()
    options = {"layout": Flat(), "mp_policy": HALF}
    ours, theirs = (shard(build(device="cuda"), **options) for _ in range(2))
    with torch._inductor.config.patch(emulate_precision_casts=True):
        found = trained(ours, recorded(ours), 6)
    for number, (a, b) in enumerate(zip(found, trained(theirs, theirs, 6), strict=True)):
        error = float((a - b).float().norm() / b.float().norm().clamp_min(1e-6))
        assert error < 3e-2, f"{number}: {error:.3f} of {tuple(a.shape)}"


def test_a_whole_step_on_a_modelled_network(alone: Callable[..., None]) -> None:
    alone()
    ours, theirs = (shard(build(device="cuda"), layout=Flat()) for _ in range(2))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=EPS) for m in (ours, theirs)]
    step = compile_step(
        ours,
        lambda logits, tokens: nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()),
        optimizers[0],
    )
    for _, part in batches(NUM_STEPS, 0, 2, "cuda"):
        loss = step(part[:, :-1], part[:, 1:])
        expected = loss_of(theirs, part)
        expected.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-3, atol=1e-3)
    assert step.why_not_replayed is None
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(full(a), full(b), rtol=1e-3, atol=1e-3)


@nccl_ranks(2, timeout_s=240)
def test_a_sharded_model_on_two_ranks() -> None:
    from torch._inductor import config  # only here: it takes long to import

    config.compile_threads = 1  # ranks are ended with no regard for workers
    ours, theirs = (shard(build(device="cuda"), layout=Flat()) for _ in range(2))
    run = recorded(ours)
    check_same(trained(ours, run), trained(theirs, theirs), 1e-3)
    check_replayed(ours, run)
    del run
    forget()
    dist.barrier()
