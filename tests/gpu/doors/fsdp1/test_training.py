"""The wrapper on NCCL ranks that share one GPU, beside torch's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from harness import nccl_ranks
from shoal.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from shoal.fsdp.sharded_grad_scaler import ShardedGradScaler
from wrapper_oracle import (
    CPU,
    HALF,
    HYBRID,
    STRATEGIES,
    WRAPPERS,
    batches,
    build_on_gpu,
    check,
    check_same,
    gpu,
    sample,
)

pytestmark = pytest.mark.filterwarnings("ignore")


@nccl_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_strategies_precisions_and_offload(strategy: ShardingStrategy) -> None:
    space = itertools.product([False, True], [None, HALF], [False, True])
    for use_orig_params, precision, offloads in space:
        check(
            gpu(),
            sharding_strategy=strategy,
            use_orig_params=use_orig_params,
            mixed_precision=precision,
            cpu_offload=CPUOffload(offloads),
        )


@nccl_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_reductions_in_low_precision(strategy: ShardingStrategy) -> None:
    """Gradients come in another dtype than the shards have, which may be on the host."""
    for use_orig_params, offloads in itertools.product([False, True], [False, True]):
        check(
            gpu(),
            sharding_strategy=strategy,
            use_orig_params=use_orig_params,
            mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
            cpu_offload=CPUOffload(offloads),
        )


@nccl_ranks(2)
def test_a_sample_of_all_combinations() -> None:
    for options in sample(8, 30):
        check(gpu(), **options)


@nccl_ranks(4)
def test_four_ranks() -> None:
    for options in sample(4, 31):
        check(gpu(), **options)
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
    for options in sample(4, 32, sharding_strategy=list(HYBRID), device_mesh=[mesh]):
        check(gpu(), **options)


@nccl_ranks(2)
@pytest.mark.parametrize("offloads", [False, True])
def test_clipping(offloads: bool) -> None:
    """Norms, their dtypes and devices, and what is left of the gradients."""

    def run(wrapper: Any) -> list[Any]:
        seen: list[Any] = []
        for use_orig_params, norm_type in itertools.product(
            [False, True], [2.0, float("inf"), 1.0]
        ):
            model = build_on_gpu(wrapper, offloads=offloads, use_orig_params=use_orig_params)
            for tokens in batches(2, gpu()):
                model(tokens).pow(2).mean().backward()
                norm = model.clip_grad_norm_(0.01, norm_type)
                seen += [norm.item(), str(norm.dtype), norm.device.type]
                model.zero_grad()
        return seen

    found, wanted = map(run, WRAPPERS)
    check_same(found, wanted, 1e-4)


@nccl_ranks(2)
def test_scaled_losses() -> None:
    """Steps in float16, one of which has infinities on one rank."""
    half = MixedPrecision(torch.float16, torch.float32, buffer_dtype=torch.float16)

    def run(wrapper: Any, offloads: bool) -> list[Any]:
        options = {"mixed_precision": half, "use_orig_params": True}
        model = build_on_gpu(wrapper, offloads=offloads, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = ShardedGradScaler(init_scale=2.0**10, growth_interval=2)
        seen: list[Any] = []
        for index, tokens in enumerate(batches(4, gpu())):
            loss = model(tokens).float().pow(2).mean()
            scaler.scale(loss).backward()
            if index == 1 and dist.get_rank() == 0:
                grad = next(p.grad for p in model.parameters() if p.grad is not None)
                grad.view(-1)[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen += [loss.item(), scaler.get_scale()]
        return seen

    for offloads in (False, True):
        found, wanted = (run(wrapper, offloads) for wrapper in WRAPPERS)
        check_same(found, wanted, 2e-2)


@nccl_ranks(2)
@pytest.mark.parametrize("rank_of_inf", [None, 0, 1])
def test_scaled_gradients_on_the_host(rank_of_inf: int | None) -> None:
    """The host neither reads the scale nor raises its flag before the device's have arrived."""
    parameter = nn.Parameter(torch.zeros(40))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = ShardedGradScaler(init_scale=4.0)
    scaler.scale(torch.ones((), device=gpu()))
    parameter.grad = torch.full_like(parameter, 8.0)
    if dist.get_rank() == rank_of_inf:
        parameter.grad[3] = float("inf")
    torch.cuda._sleep(200_000_000)  # a tenth of a second in which nothing comes
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (4.0 if rank_of_inf is None else 2.0)
    expected = torch.full_like(parameter, -2.0 if rank_of_inf is None else 0.0)
    assert torch.equal(parameter, expected)


@nccl_ranks(2)
def test_modules_on_the_host() -> None:
    """Without `device_id` a module stays where it is until it is moved."""
    with pytest.warns(UserWarning, match="passed-in `module` is on CPU"):
        model = FullyShardedDataParallel(nn.Linear(40, 40))
    assert {p.device for p in model.parameters()} == {CPU}
    with pytest.raises(RuntimeError, match="unexpectedly has parameters on cpu"):
        model(torch.randn(2, 40))
    with pytest.warns(UserWarning, match="passed-in `module` is on CPU"):
        model = FullyShardedDataParallel(nn.Linear(40, 40)).cuda()
    model(torch.randn(2, 40)).sum().backward()
    assert {p.grad.device.type for p in model.parameters() if p.grad is not None} == {"cuda"}

    tiny = FullyShardedDataParallel(nn.Linear(2, 1)).cuda()  # the second rank has nothing of it
    tiny(torch.randn(2, 2)).sum().backward()

    with pytest.raises(ValueError, match="which requires them to be on cuda"):
        FullyShardedDataParallel(nn.Linear(4, 4), sync_module_states=True)
    synced = FullyShardedDataParallel(
        nn.Linear(40, 40), sync_module_states=True, device_id=torch.cuda.current_device()
    )
    weights = [value.clone() for value in synced.state_dict().values()]
    for value in weights:
        others = value.clone()
        dist.broadcast(others, 0)
        assert torch.equal(value, others)

    offloaded = FullyShardedDataParallel(
        nn.Linear(40, 40), cpu_offload=CPUOffload(True), device_id=torch.cuda.current_device()
    )
    offloaded.to("cuda")
    with pytest.raises(RuntimeError, match="Make sure to not move the module from CPU"):
        offloaded(torch.randn(2, 40))

    with pytest.warns(UserWarning, match="does not have an explicit index"):
        FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cuda"))
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).cuda())
    with pytest.raises(RuntimeError, match="both CPU and GPU params"):
        FullyShardedDataParallel(mixed)


@nccl_ranks(2)
def test_wrappers_inside_that_are_offloaded() -> None:
    """What they hold is on the host, which says nothing of where the module around computes."""
    offload = CPUOffload(offload_params=True)
    inner = FullyShardedDataParallel(nn.Linear(40, 40).cuda(), cpu_offload=offload)
    outer = nn.Sequential(inner, nn.Linear(40, 4).cuda())
    model = FullyShardedDataParallel(outer, cpu_offload=offload)
    assert {p.device for p in model.parameters()} == {CPU}
    model(torch.randn(2, 40)).sum().backward()
    assert {p.grad.device for p in model.parameters() if p.grad is not None} == {CPU}
