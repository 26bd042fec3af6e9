"""Training with a wrapper, torch's or ours, on any device: what both must agree on."""

from __future__ import annotations

import itertools
import random
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor as TorchShardedTensor
from torch.distributed.fsdp import FullyShardedDataParallel as TorchWrapper
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map, tree_structure

from shoal.doors.fsdp1.state_dict_values import whole_of
from shoal.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from shoal.fsdp.wrap import ModuleWrapPolicy

CPU = torch.device("cpu")
HALF = MixedPrecision(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16
)
WRAPPERS: tuple[Any, Any] = (FullyShardedDataParallel, TorchWrapper)
HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
STRATEGIES = tuple(sorted(set(ShardingStrategy) - set(HYBRID), key=lambda one: one.name))
SPACE: dict[str, list[Any]] = {
    "sharding_strategy": list(STRATEGIES),
    "use_orig_params": [False, True],
    "mixed_precision": [None, HALF],
    "backward_prefetch": [*BackwardPrefetch, None],
    "cpu_offload": [None, CPUOffload(True)],
    "forward_prefetch": [False, True],
    "num_backwards": [1, 2],
}


def sample(num: int, seed: int, **others: list[Any]) -> list[dict[str, Any]]:
    """Some of all combinations, the same ones in every run."""
    space = SPACE | others
    every = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    return random.Random(seed).sample(every, num)


class Block(nn.Module):
    """Sizes that divide no number of ranks, and a buffer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim + 1), nn.Linear(2 * dim + 1, dim)
        self.norm = nn.LayerNorm(dim)
        self.register_buffer("scale", torch.full((dim,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.down(torch.relu(self.up(x)))) * self.scale


class Model(nn.Module):
    """Blocks between an embedding and a head."""

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


def build(wrapper: Any, device: torch.device, **options: Any) -> Any:
    """The same weights on every call, wrapped."""
    torch.manual_seed(0)
    policy = ModuleWrapPolicy({Block})
    return wrapper(Model(), device_id=device, auto_wrap_policy=policy, **options)


def gpu() -> torch.device:
    """The device that all ranks of a test share."""
    return torch.device("cuda", torch.cuda.current_device())


def build_on_gpu(wrapper: Any, *, offloads: bool = False, **options: Any) -> Any:
    """A model that computes on the GPU, with its shards there or on the host."""
    return build(wrapper, gpu(), cpu_offload=CPUOffload(offloads), **options)


def batches(num: int, device: torch.device) -> list[torch.Tensor]:
    """Tokens, others on every rank."""
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    return [torch.randint(11, (4, 6), generator=generator).to(device) for _ in range(num)]


def train(wrapper: Any, num_backwards: int, device: torch.device, **options: Any) -> list[Any]:
    """Losses, and the squared sizes of gradients and parameters over all ranks, step by step.

    At the end the state dicts of model and optimizer, whole and in rows.
    """
    model = build(wrapper, device, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    seen: list[Any] = []
    tokens = iter(batches(3 * num_backwards, device))
    for _ in range(3):
        for index in range(num_backwards):
            with nullcontext() if index == num_backwards - 1 else model.no_sync():
                loss = model(next(tokens)).float().pow(2).mean()
                loss.backward()
            seen.append(loss.item())
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        seen.append(sorted({str(grad.dtype) for grad in grads}))
        seen.append(total(grads, device))
        optimizer.step()
        held = [*model.parameters()], grads, optimizer.state_dict()["state"]
        seen.append([places(tensors) for tensors in held])
        optimizer.zero_grad()
        seen.append(total(list(model.parameters()), device))
    return [*seen, *state_dicts(wrapper, model, optimizer, device)]


def state_dicts(
    wrapper: Any, model: Any, optimizer: torch.optim.Optimizer, device: torch.device
) -> list[Any]:
    """What the kinds of state dicts hold, by name, and where."""
    kinds = {
        StateDictType.FULL_STATE_DICT: FullOptimStateDictConfig(offload_to_cpu=False),
        StateDictType.SHARDED_STATE_DICT: ShardedOptimStateDictConfig(offload_to_cpu=False),
    }
    # Where nothing is sharded, torch cuts the states of flat parameters into rows all the same.
    is_whole = model.sharding_strategy is ShardingStrategy.NO_SHARD
    show = partial(whole if is_whole else held, device=device)
    found: list[Any] = []
    for kind, config in kinds.items():
        with wrapper.state_dict_type(model, kind, optim_state_dict_config=config):
            saved = [model.state_dict(), wrapper.optim_state_dict(model, optimizer)]
        saved[1]["state"] = {
            name: dict(sorted(state.items())) for name, state in sorted(saved[1]["state"].items())
        }
        saved[1]["param_groups"] = [sorted(g["params"]) for g in saved[1]["param_groups"]]
        found += [places(part) for part in saved]
        found += [tree_map(show, part) for part in saved]
    return found


def held(value: Any, device: torch.device) -> Any:
    """What this rank has of a tensor, on a device, and which part of the whole it is."""
    if isinstance(value, TorchShardedTensor):
        return [
            (shard.metadata.shard_offsets, shard.metadata.shard_sizes, held(shard.tensor, device))
            for shard in value.local_shards()
        ]
    if isinstance(value, DTensor):
        return [str(value.placements), held(value.to_local(), device)]
    return value.detach().to(device, copy=True) if isinstance(value, torch.Tensor) else value


def whole(value: Any, device: torch.device) -> Any:
    """A tensor as it is without sharding, on a device."""
    if not isinstance(value, torch.Tensor):
        return value
    return whole_of(value, device).to(device, copy=True)


def places(values: Any) -> list[str]:
    """The kinds of devices on which this rank has what tensors hold."""
    found: set[str] = set()
    for value in tree_leaves(values):
        if isinstance(value, TorchShardedTensor):
            found.update(shard.tensor.device.type for shard in value.local_shards())
        elif isinstance(value, torch.Tensor):
            found.add(value.device.type)
    return sorted(found)


def total(tensors: list[torch.Tensor], device: torch.device) -> float:
    """The squares of all ranks' elements, added up."""
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        squares += tensor.detach().double().pow(2).sum().to(device)
    dist.all_reduce(squares)
    return squares.item()


def check(device: torch.device = CPU, **options: Any) -> None:
    """Both wrappers train alike, and save the same."""
    num_backwards = options.pop("num_backwards", 1)
    # torch offloads parameters to the host from an accelerator only; nothing else may change.
    theirs = options if device.type != "cpu" else options | {"cpu_offload": None}
    expected = train(TorchWrapper, num_backwards, device, **theirs)
    actual = train(FullyShardedDataParallel, num_backwards, device, **options)
    tolerance = 1e-6 if device.type == "cpu" else 1e-4
    if options.get("mixed_precision") is not None:
        tolerance = 2e-2
    check_same(actual, expected, tolerance)


def check_same(actual: Any, expected: Any, tolerance: float) -> None:
    """Compare what was seen, number by number."""
    for found, wanted in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        if isinstance(wanted, (torch.Tensor, float)):
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
        else:
            assert found == wanted
    assert tree_structure(actual) == tree_structure(expected)
