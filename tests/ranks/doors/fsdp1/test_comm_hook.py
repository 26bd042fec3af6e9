"""Communication hooks, beside torch's wrapper with the same ones."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchWrapper

from harness import ranks
from shoal.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
STRATEGIES = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)


def model_of(wrapper: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4))
    model[2] = wrapper(model[2], device_id=CPU, **options)
    return wrapper(model, device_id=CPU, **options)


def squares(model: nn.Module, *, is_whole: bool) -> torch.Tensor:
    """The squares of the gradients of all ranks, unit by unit."""
    found = []
    for one in model.modules():
        if isinstance(one, (FullyShardedDataParallel, TorchWrapper)):
            own = torch.zeros(())
            for parameter in one.parameters():
                if parameter.grad is not None:
                    own += parameter.grad.pow(2).sum()
            if not is_whole:
                dist.all_reduce(own)
            found.append(own)
    return torch.stack(found)


def trained(wrapper: Any, hook: Any, state: Any, num_steps: int = 2, **options: Any) -> Any:
    model = model_of(wrapper, **options)
    if hook is not None:
        model.register_comm_hook(state, hook)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(num_steps):
        model(torch.randn(3, 6, generator=generator)).pow(2).sum().backward()
    is_whole = options["sharding_strategy"] is ShardingStrategy.NO_SHARD
    return squares(model, is_whole=is_whole)


class Noise:
    """A hook that adds noise, and counts what it was given."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, state: int, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
        self.shapes.append((grad.dim(), 0 if output is None else output.dim()))
        grad.add_(state)
        if output is None:
            dist.all_reduce(grad)
        else:
            assert grad.numel() == dist.get_world_size() * output.numel()
            dist.reduce_scatter_tensor(output, grad)


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_hooks_reduce_as_they_do_for_torch(use_orig_params: bool) -> None:
    for strategy in STRATEGIES:
        options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
        is_whole = strategy is ShardingStrategy.NO_SHARD
        default = default_hooks.allreduce_hook if is_whole else default_hooks.reduce_scatter_hook
        state = default_hooks.DefaultState(dist.group.WORLD)  # pyright: ignore
        ours = trained(FullyShardedDataParallel, default, state, **options)
        theirs = trained(TorchWrapper, default, state, **options)
        torch.testing.assert_close(ours, theirs)


@ranks(2)
def test_a_hook_of_the_user() -> None:
    for strategy in STRATEGIES:
        ours, theirs = Noise(), Noise()
        got = trained(FullyShardedDataParallel, ours, 0, 1, sharding_strategy=strategy)
        expected = trained(TorchWrapper, theirs, 0, 1, sharding_strategy=strategy)
        torch.testing.assert_close(got, expected)
        assert ours.shapes == theirs.shapes
        quiet = trained(FullyShardedDataParallel, Noise(), 0, sharding_strategy=strategy)
        loud = trained(FullyShardedDataParallel, Noise(), 5, sharding_strategy=strategy)
        assert (loud > quiet).all()


@ranks(2)
def test_compression() -> None:
    hooks = {
        torch.float16: default_hooks.fp16_compress_hook,
        torch.bfloat16: default_hooks.bf16_compress_hook,
    }
    for strategy, (dtype, hook) in itertools.product(STRATEGIES, hooks.items()):
        state = default_hooks.LowPrecisionState(dist.group.WORLD)
        got = trained(FullyShardedDataParallel, hook, state, 1, sharding_strategy=strategy)
        # torch's own hooks do not run on the CPU; its mixed precision rounds as they do.
        half = MixedPrecision(reduce_dtype=dtype)
        expected = trained(
            TorchWrapper, None, None, 1, sharding_strategy=strategy, mixed_precision=half
        )
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


@ranks(2)
def test_no_sync_calls_no_hook() -> None:
    hook = Noise()
    model = model_of(FullyShardedDataParallel)
    model.register_comm_hook(0, hook)
    with model.no_sync():
        model(torch.ones(2, 6)).sum().backward()
    assert hook.shapes == []
    model(torch.ones(2, 6)).sum().backward()
    assert len(hook.shapes) == 2


@ranks(2)
def test_refusals() -> None:
    model = model_of(FullyShardedDataParallel)
    inner = FullyShardedDataParallel.fsdp_modules(model)[1]
    assert model.check_is_root()
    assert not inner.check_is_root()
    with pytest.raises(AssertionError, match="can only be called on a root instance"):
        inner.register_comm_hook(None, Noise())
    with pytest.raises(ValueError, match="must be callable"):
        model.register_comm_hook(None, 3)
    model.register_comm_hook(7, hook := Noise())
    assert [one._comm_hook for one in model.fsdp_modules(model)] == [hook, hook]
    assert [one._comm_hook_state for one in model.fsdp_modules(model)] == [7, 7]
    with pytest.raises(AssertionError, match="already registered"):
        model.register_comm_hook(None, Noise())
    ran = model_of(FullyShardedDataParallel)
    ran(torch.ones(2, 6)).sum().backward()
    with pytest.raises(AssertionError, match="already ran"):
        ran.register_comm_hook(None, Noise())


@ranks(4)
def test_hybrid_strategies_take_no_hook() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = FullyShardedDataParallel(
        nn.Linear(3, 3),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=CPU,
    )
    with pytest.raises(AssertionError, match="not supported for hybrid strategies"):
        model.register_comm_hook(None, Noise())
