"""The wrapper on NCCL ranks that share one GPU, beside torch's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchWrapper

from harness import nccl_ranks
from shoal.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from shoal.fsdp.sharded_grad_scaler import ShardedGradScaler
from wrapper_oracle import (
    HALF,
    HYBRID,
    STRATEGIES,
    batches,
    build,
    check,
    check_same,
    sample,
    whole,
)

pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
WRAPPERS: tuple[Any, Any] = (FullyShardedDataParallel, TorchWrapper)


def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


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
            model = build(
                wrapper,
                gpu(),
                use_orig_params=use_orig_params,
                cpu_offload=CPUOffload(offloads),
            )
            for tokens in batches(2, gpu()):
                model(tokens).pow(2).mean().backward()
                norm = model.clip_grad_norm_(0.01, norm_type)
                seen += [norm.item(), str(norm.dtype), norm.device.type]
                model.zero_grad()
        return seen

    check_same(run(FullyShardedDataParallel), run(TorchWrapper), 1e-4)


@nccl_ranks(2)
def test_scaled_losses() -> None:
    """Steps in float16, one of which has infinities on one rank."""
    half = MixedPrecision(torch.float16, torch.float32, buffer_dtype=torch.float16)

    def run(wrapper: Any, offloads: bool) -> list[Any]:
        model = build(
            wrapper,
            gpu(),
            mixed_precision=half,
            use_orig_params=True,
            cpu_offload=CPUOffload(offloads),
        )
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


def trained(wrapper: Any, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = build(wrapper, gpu(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for tokens in batches(2, gpu()):
        model(tokens).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


CONFIGS: list[tuple[StateDictType, Any, Any]] = [
    (
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
    ),
    (
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True),
        FullOptimStateDictConfig(offload_to_cpu=True),
    ),
    (
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=True),
        ShardedOptimStateDictConfig(offload_to_cpu=True),
    ),
    (
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(),
        ShardedOptimStateDictConfig(offload_to_cpu=False),
    ),
]


@nccl_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_state_dicts(use_orig_params: bool) -> None:
    """Saved to the host or not, by one rank or all, and loaded by another model."""
    pairs = [trained(wrapper, use_orig_params=use_orig_params) for wrapper in WRAPPERS]
    for kind, config, optim_config in CONFIGS:
        saved = []
        for wrapper, (model, optimizer) in zip(WRAPPERS, pairs, strict=True):
            with wrapper.state_dict_type(model, kind, config, optim_config):
                saved.append((model.state_dict(), wrapper.optim_state_dict(model, optimizer)))
        devices = [{v.device.type for v in weights.values()} for weights, _ in saved]
        assert devices[0] == devices[1]
        found, wanted = (
            [
                {name: on_host(value) for name, value in weights.items()},
                {
                    f"{name}.{part}": on_host(value)
                    for name, state in sorted(states.get("state", {}).items())
                    for part, value in sorted(state.items())
                },
            ]
            for weights, states in saved
        )
        check_same(found, wanted, 1e-4)
        if not getattr(config, "rank0_only", False):
            check_loading(kind, config, optim_config, saved[0], use_orig_params)


def on_host(value: Any) -> Any:
    """The whole of a value, wherever its parts are."""
    return whole(value, gpu()).cpu()


def check_loading(
    kind: StateDictType, config: Any, optim_config: Any, saved: Any, use_orig_params: bool
) -> None:
    wrapper = FullyShardedDataParallel
    torch.manual_seed(1)
    other, optimizer = trained(wrapper, use_orig_params=use_orig_params)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    with wrapper.state_dict_type(other, kind, config, optim_config):
        other.load_state_dict(saved[0])
        states = wrapper.optim_state_dict_to_load(other, optimizer, saved[1])
        optimizer.load_state_dict(states)
        again = other.state_dict(), wrapper.optim_state_dict(other, optimizer)
    for name, value in saved[0].items():
        assert torch.equal(on_host(again[0][name]), on_host(value)), name
    for name, state in saved[1]["state"].items():
        for part, value in state.items():
            assert torch.equal(on_host(again[1]["state"][name][part]), on_host(value)), name


@nccl_ranks(2)
def test_whole_parameters() -> None:
    """On the device or on the host, of all ranks or one; what is written stays, if asked."""

    def run(wrapper: Any) -> list[Any]:
        seen: list[Any] = []
        for use_orig_params, offloads in itertools.product([False, True], [False, True]):
            model, _ = trained(
                wrapper, use_orig_params=use_orig_params, cpu_offload=CPUOffload(offloads)
            )
            with wrapper.summon_full_params(
                model, writeback=False, rank0_only=True, offload_to_cpu=True
            ):
                if dist.get_rank() == 0:
                    parameters = dict(model.named_parameters())
                    seen.append(sorted(parameters))
                    seen += [parameters[name].detach().cpu() for name in sorted(parameters)]
                    seen.append({p.device.type for p in parameters.values()})
            with wrapper.summon_full_params(model), torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.05, 0.05)
            seen += [value.cpu() for value in model.state_dict().values()]
        return seen

    check_same(run(FullyShardedDataParallel), run(TorchWrapper), 1e-4)


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
