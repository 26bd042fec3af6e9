"""`fully_shard` with large parameters gathered in place, beside one gather that is copied out of.

    python benchmarks/sections.py --out benchmarks/results/FILE.json

Two gloo ranks of one thread, three units of two 2048 × 2048 matrices; forward+backward in turns.
"""

from __future__ import annotations

import statistics
from time import perf_counter
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from shoal import fully_shard
from shoal.bench.script import flags, on_ranks, store, turns
from shoal.layout.even import ALONE_NUMEL

LIMITS = {"one gather": 1 << 60, "sections": ALONE_NUMEL}
DIM = 2048


def build(limit: int) -> nn.Module:
    """A model whose parameters of so many elements are gathered in place."""
    torch.manual_seed(0)
    with patch("shoal.layout.even.ALONE_NUMEL", limit):
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM)) for _ in range(3))
        )
        for block in model:
            fully_shard(block)
        return fully_shard(model)


def measure(rounds: int) -> dict[str, list[float]]:
    """Step all variants by turns: the times of each."""
    models = {name: build(limit) for name, limit in LIMITS.items()}
    x = torch.randn(16, DIM)
    times: dict[str, list[float]] = {name: [] for name in models}
    for number, name in turns(models, rounds + 1):
        model = models[name]
        dist.barrier()
        start = perf_counter()
        loss = model(x).square().mean()
        loss.backward()
        elapsed_ms = (perf_counter() - start) * 1e3
        assert torch.isfinite(loss)
        model.zero_grad()
        if number:  # the first one warms up
            times[name].append(elapsed_ms)
    return times


def main() -> None:
    """Measure, print a table, and write a file if one is named."""
    options = flags(__doc__, rounds=15).parse_args()
    times: dict[str, list[float]] = on_ranks(2, measure, options.rounds)
    for name, some in times.items():
        print(f"{name:12} median {statistics.median(some):7.1f} ms, quietest {min(some):7.1f} ms")
    store(options.out, forward_backward_ms=times)


if __name__ == "__main__":
    main()
