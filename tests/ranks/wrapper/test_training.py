"""Training with the wrapper, beside torch's own: every strategy, flat or original parameters."""

from __future__ import annotations

import itertools
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchWrapper

from harness import ranks
from shoal.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from shoal.fsdp.wrap import ModuleWrapPolicy

pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
HALF = MixedPrecision(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16
)
HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim + 1), nn.Linear(2 * dim + 1, dim)
        self.norm = nn.LayerNorm(dim)
        self.register_buffer("scale", torch.full((dim,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.down(torch.relu(self.up(x)))) * self.scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(wrapper: Any, num_backwards: int, **options: Any) -> list[float]:
    """Losses, and the squared sizes of gradients and parameters over all ranks, step by step."""
    torch.manual_seed(0)
    model = wrapper(Model(), device_id=CPU, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    seen: list[float] = []
    for _ in range(3):
        for index in range(num_backwards):
            tokens = torch.randint(11, (4, 6), generator=generator)
            with nullcontext() if index == num_backwards - 1 else model.no_sync():
                loss = model(tokens).float().pow(2).mean()
                loss.backward()
            seen.append(loss.item())
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        seen.append(total(grads))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(total(list(model.parameters())))
    return seen


def total(tensors: list[torch.Tensor]) -> float:
    """The squares of all ranks' elements, added up."""
    squares = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        squares += tensor.detach().double().pow(2).sum()
    dist.all_reduce(squares)
    return squares.item()


def check(**options: Any) -> None:
    num_backwards = options.pop("num_backwards", 1)
    expected = train(TorchWrapper, num_backwards, **options)
    actual = train(FullyShardedDataParallel, num_backwards, **options)
    tolerance = 1e-6 if options.get("mixed_precision") is None else 2e-2
    torch.testing.assert_close(
        torch.tensor(actual), torch.tensor(expected), rtol=tolerance, atol=tolerance
    )


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize(
    "strategy",
    [
        ShardingStrategy.FULL_SHARD,
        ShardingStrategy.SHARD_GRAD_OP,
        ShardingStrategy.NO_SHARD,
    ],
    ids=lambda strategy: strategy.name,
)
def test_strategies(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    check(sharding_strategy=strategy, use_orig_params=use_orig_params)


@ranks(4)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", HYBRID, ids=lambda strategy: strategy.name)
def test_hybrid_strategies(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    check(device_mesh=mesh, **options)
    groups = mesh.get_group(1), mesh.get_group(0)
    check(process_group=groups, num_backwards=2, **options)


@ranks(2)
def test_a_sample_of_all_combinations() -> None:
    space = {
        "sharding_strategy": list(set(ShardingStrategy) - set(HYBRID)),
        "use_orig_params": [False, True],
        "mixed_precision": [None, HALF],
        "backward_prefetch": [
            BackwardPrefetch.BACKWARD_PRE,
            BackwardPrefetch.BACKWARD_POST,
            None,
        ],
        "cpu_offload": [CPUOffload(False), CPUOffload(True)],
        "forward_prefetch": [False, True],
        "num_backwards": [1, 2],
    }
    space["sharding_strategy"].sort(key=lambda strategy: strategy.name)
    every = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    # torch offloads parameters to the host from an accelerator only.
    every = [options for options in every if not options["cpu_offload"].offload_params]
    for options in random.Random(0).sample(every, 12):
        check(**options)
