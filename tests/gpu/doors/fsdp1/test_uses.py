"""What recipes do with the wrapper, on NCCL ranks that share one GPU, beside torch's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel as TorchWrapper

from harness import nccl_ranks
from shoal.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from shoal.fsdp.wrap import ModuleWrapPolicy
from wrapper_oracle import (
    STRATEGIES,
    Block,
    Model,
    batches,
    build_on_gpu,
    check_same,
    gpu,
    places,
    total,
)

pytestmark = pytest.mark.filterwarnings("ignore")


def steps(model: Any, num: int = 3) -> list[Any]:
    """Losses, and the sizes of gradients, of steps that accumulate two backwards each."""
    # Lists must have one dtype, which narrow gradients and their parameters have not.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    seen: list[Any] = []
    for tokens in batches(num, gpu()):
        for half in tokens.chunk(2):
            loss = model(half).float().pow(2).mean()
            loss.backward()
            seen.append(loss.item())
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        seen += [sorted({str(grad.dtype) for grad in grads}), total(grads, gpu())]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@nccl_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_hooks(strategy: ShardingStrategy) -> None:
    is_whole = strategy is ShardingStrategy.NO_SHARD
    plain = default_hooks.allreduce_hook if is_whole else default_hooks.reduce_scatter_hook
    hooks: list[tuple[Any, type]] = [
        (plain, default_hooks.DefaultState),
        (default_hooks.fp16_compress_hook, default_hooks.LowPrecisionState),
        (default_hooks.bf16_compress_hook, default_hooks.LowPrecisionState),
    ]

    def run(wrapper: Any, hook: Any, state: type, **options: Any) -> list[Any]:
        model = build_on_gpu(wrapper, sharding_strategy=strategy, **options)
        model.register_comm_hook(state(dist.group.WORLD), hook)
        # One backward each: without sharding, torch reduces again what was reduced before.
        model(batches(1, gpu())[0]).pow(2).mean().backward()
        return [total([p.grad for p in model.parameters() if p.grad is not None], gpu())]

    for (hook, state), use_orig_params in itertools.product(hooks, [False, True]):
        found, wanted = (
            run(wrapper, hook, state, use_orig_params=use_orig_params)
            for wrapper in (FullyShardedDataParallel, TorchWrapper)
        )
        check_same(found, wanted, 1e-4)


@nccl_ranks(2)
@pytest.mark.parametrize("offloads", [False, True])
def test_narrow_gradients(offloads: bool) -> None:
    """They are cast where they are, on the host when they have arrived there."""
    for strategy, use_orig_params in itertools.product(STRATEGIES, [False, True]):
        options = {
            "sharding_strategy": strategy,
            "use_orig_params": use_orig_params,
            "mixed_precision": MixedPrecision(
                torch.bfloat16, torch.float32, torch.bfloat16, keep_low_precision_grads=True
            ),
        }
        found = steps(build_on_gpu(FullyShardedDataParallel, offloads=offloads, **options))
        check_same(found, steps(build_on_gpu(TorchWrapper, **options)), 2e-2)


@nccl_ranks(2)
@pytest.mark.parametrize("around", [checkpoint_wrapper, offload_wrapper])
def test_activations(around: Any) -> None:
    """Blocks whose activations are computed again, or wait on the host."""

    def run(wrapper: Any, **options: Any) -> list[Any]:
        torch.manual_seed(0)
        model = Model().to(gpu())
        for index, block in enumerate(model.blocks):
            model.blocks[index] = wrapper(around(block), device_id=gpu(), **options)
        return steps(wrapper(model, device_id=gpu(), **options))

    for use_orig_params, offloads in itertools.product([False, True], [False, True]):
        offload = CPUOffload(offloads)
        found = run(FullyShardedDataParallel, use_orig_params=use_orig_params, cpu_offload=offload)
        check_same(found, run(TorchWrapper, use_orig_params=use_orig_params), 1e-4)


@nccl_ranks(2)
@pytest.mark.parametrize("offloads", [False, True])
def test_weights_that_the_first_rank_alone_has(offloads: bool) -> None:
    """The others begin without memory: they make some, and are sent values."""

    def run(wrapper: Any, use_orig_params: bool) -> list[Any]:
        torch.manual_seed(0)
        with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
            model: nn.Module = Model()
        wrapped = wrapper(
            model,
            device_id=gpu(),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            param_init_fn=lambda one: one.to_empty(device=gpu(), recurse=False),
            sync_module_states=True,
            use_orig_params=use_orig_params,
            cpu_offload=CPUOffload(offloads),
        )
        place = "cpu" if offloads else "cuda"
        assert places(list(wrapped.parameters())) == [place]
        return [total(list(wrapped.parameters()), gpu()), *wrapped.state_dict().values()]

    for use_orig_params in (False, True):
        ours = run(FullyShardedDataParallel, use_orig_params)
        check_same(ours, run(TorchWrapper, use_orig_params), 1e-6)
