"""Resharding and gathering on gloo ranks of one machine, beside torch's own ShardedTensor.

    python benchmarks/reshard.py --out benchmarks/results/reshard.json

A tensor that is cut along dim 0 is resharded to dim 1, and gathered on rank 0. Both libraries take
turns in the same processes; of all rounds the fastest counts. The peak is what a rank's allocator
hands out meanwhile, results included, over the larger local shard; on the rank where it is largest.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard import sharded_tensor, sharding_spec
from torch.profiler import profile

from shoal.bench.script import flags, on_ranks, store
from shoal.tensor.sharded import ShardedTensor
from shoal.tensor.spec import ChunkShardingSpec
from shoal.tensor.transfer import MAX_EXTRA

Action = Callable[[], object]


def main() -> None:
    """Measure, print a table, and write a file if one is named."""
    parser = flags(__doc__, rounds=6)
    parser.add_argument("--mib", type=int, default=512, help="size of the whole tensor")
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    found = on_ranks(options.ranks, _rank, options.mib, options.rounds)
    print(f"{options.mib} MiB on {options.ranks} gloo ranks; the cap is {MAX_EXTRA} local shards")
    for name, of in found.items():
        print(
            f"{name:20} shoal {of['shoal']['ms']:7.1f} ms, peak {of['shoal']['peak']:.2f} shards   "
            f"torch {of['torch']['ms']:7.1f} ms, peak {of['torch']['peak']:.2f} shards"
        )
    settings = {"mib": options.mib, "ranks": options.ranks, "rounds": options.rounds}
    store(options.out, settings=settings, max_extra=MAX_EXTRA, results=found)


def _rank(mib: int, rounds: int) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["KINETO_LOG_LEVEL"] = "9"  # else the profiler tells when it starts and stops
    warnings.filterwarnings("ignore", category=FutureWarning, message="Please use DTensor")
    num_rows = size * 2 ** round(math.log2(math.sqrt(mib * 2**18) / size))
    shape = (num_rows, mib * 2**18 // num_rows)
    local = torch.randn(num_rows // size, shape[1])
    whole = torch.empty(shape) if rank == 0 else None
    found = {
        "reshard dim 0 to 1": {
            "shoal": lambda: _ours(local, shape).reshard(ChunkShardingSpec(1, _places(size))),
            "torch": lambda: _theirs(local, shape).reshard(
                sharding_spec.ChunkShardingSpec(1, _places(size))
            ),
        },
        "gather on rank 0": {
            "shoal": lambda: _ours(local, shape).gather(0, whole),
            "torch": lambda: _theirs(local, shape).gather(0, whole),
        },
    }
    return {name: _measure(arms, rounds, local.nbytes) for name, arms in found.items()}


def _measure(arms: dict[str, Action], rounds: int, shard_bytes: int) -> dict[str, dict[str, float]]:
    """The fastest round of each arm, and the largest peak of any rank."""
    seconds = dict.fromkeys(arms, math.inf)
    for _ in range(rounds):
        for name, act in arms.items():
            dist.barrier()
            start = time.perf_counter()
            act()
            dist.barrier()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    peaks = torch.tensor([_peak_bytes(act) for act in arms.values()])
    dist.all_reduce(peaks, dist.ReduceOp.MAX)
    return {
        name: {"ms": round(1e3 * seconds[name], 1), "peak": round(int(peak) / shard_bytes, 3)}
        for name, peak in zip(arms, peaks, strict=True)
    }


def _peak_bytes(act: Action) -> int:
    """What the CPU allocator has handed out at most, beyond what was there before."""
    with profile(profile_memory=True) as profiler:
        act()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def _ours(local: Tensor, shape: tuple[int, int]) -> ShardedTensor:
    spec = ChunkShardingSpec(0, _places(dist.get_world_size()))
    return ShardedTensor._init_from_local_tensor(local, spec, shape)


def _theirs(local: Tensor, shape: tuple[int, int]) -> sharded_tensor.ShardedTensor:
    spec = sharding_spec.ChunkShardingSpec(0, _places(dist.get_world_size()))
    return sharded_tensor.ShardedTensor._init_from_local_tensor(local, spec, shape)


def _places(size: int) -> list[str]:
    return [f"rank:{rank}/cpu" for rank in range(size)]


if __name__ == "__main__":
    main()
