"""Whole, sharded and local values of wrapped models on NCCL ranks that share one GPU."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as TorchWrapper

from harness import nccl_ranks
from shoal.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from wrapper_oracle import (
    CPU,
    STRATEGIES,
    WRAPPERS,
    batches,
    build_on_gpu,
    check_same,
    gpu,
    places,
    total,
    whole,
)

pytestmark = pytest.mark.filterwarnings("ignore")


def trained(wrapper: Any, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = build_on_gpu(wrapper, **options)
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
        # Not torch's places: with a group that also serves the host, it calls sharded values
        # host's own, and leaves them on the device.
        expected = "cpu" if config.offload_to_cpu else "cuda"
        assert set(places(saved[0][0])) <= {expected}
        assert set(places(saved[0][1])) <= {expected, "cpu"}  # steps are counted on the host
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
            model, _ = trained(wrapper, use_orig_params=use_orig_params, offloads=offloads)
            with wrapper.summon_full_params(
                model, writeback=False, rank0_only=True, offload_to_cpu=True
            ):
                if dist.get_rank() == 0:
                    parameters = dict(model.named_parameters())
                    seen.append(sorted(parameters))
                    seen += [parameters[name].detach().cpu() for name in sorted(parameters)]
                    seen.append({p.device.type for p in parameters.values()})
            for is_on_host, bound in ((False, 0.05), (True, 0.02)):
                whole_ones = wrapper.summon_full_params(model, offload_to_cpu=is_on_host)
                with whole_ones, torch.no_grad():
                    seen.append(places(list(model.parameters())))
                    for parameter in model.parameters():
                        parameter.clamp_(-bound, bound)
                seen.append(places(list(model.parameters())))
                seen += [value.cpu() for value in model.state_dict().values()]
        return seen

    check_same(run(FullyShardedDataParallel), run(TorchWrapper), 1e-4)


@nccl_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_whole_gradients_of_offloaded_parameters(strategy: ShardingStrategy) -> None:
    """As without offloading, since torch refuses them here; what is written stays."""

    def run(offloads: bool) -> list[Any]:
        options = {"sharding_strategy": strategy, "use_orig_params": True}
        model = build_on_gpu(FullyShardedDataParallel, offloads=offloads, **options)
        model(batches(1, gpu())[0]).pow(2).mean().backward()
        seen: list[Any] = []
        for _ in range(2):
            with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
                grads = {name: p.grad for name, p in model.named_parameters()}
                assert places(grads) == ["cuda"]
                seen += [grads[name].cpu() for name in sorted(grads)]
                for grad in grads.values():
                    grad.mul_(2)
            held = [p.grad for p in model.parameters() if p.grad is not None]
            assert places(held) == places(list(model.parameters()))
            seen.append(total(held, gpu()))
        return seen

    check_same(run(True), run(False), 1e-5)


LOADED = [
    (strategy, use_orig_params, kind)
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD)
    for use_orig_params in (False, True)
    for kind in StateDictType
    if strategy is not ShardingStrategy.NO_SHARD or kind is StateDictType.FULL_STATE_DICT
]


@nccl_ranks(2)
def test_loading_into_offloaded_models() -> None:
    """What is loaded reaches the shards, which stay on the host, and training goes on."""
    for strategy, use_orig_params, kind in LOADED:
        options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
        model, optimizer = trained(FullyShardedDataParallel, offloads=True, **options)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with FullyShardedDataParallel.state_dict_type(model, kind):
            saved = copies(model.state_dict())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            model.load_state_dict(saved)
        for parameter, value in zip(model.parameters(), before, strict=True):
            assert parameter.device == CPU
            assert torch.equal(parameter, value)
        model(batches(1, gpu())[0]).pow(2).mean().backward()
        optimizer.step()
        assert places(list(model.parameters())) == ["cpu"]


def copies(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Values that stay when the model's change: local state dicts are its memory."""
    return {name: copy.deepcopy(value) for name, value in state_dict.items()}
