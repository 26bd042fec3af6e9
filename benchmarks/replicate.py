"""A training step of `shoal.replicate` beside torch's DistributedDataParallel, on gloo ranks.

    python benchmarks/replicate.py --out benchmarks/results/replicate.json

The model has many small layers, so that the host's work for each parameter counts. All arms take
turns in the same processes; of all steps the fastest counts, on the slowest rank.
"""

from __future__ import annotations

import math
import time
import warnings
from argparse import Namespace
from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shoal.compile  # noqa: F401 - so that torch knows the backend in a source folder
from shoal import replicate
from shoal.bench.script import flags, on_ranks, store, turns


def compiled(model: nn.Module) -> nn.Module:
    """A replicated model whose averages are in the graph, in buckets."""
    replicate(model)
    return cast(nn.Module, torch.compile(model, backend="shoal", fullgraph=True))


ARMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "shoal": replicate,
    "torch": DistributedDataParallel,
    "shoal, compiled": compiled,
    "shoal, views": lambda model: replicate(model, gradient_as_bucket_view=True),
    "torch, views": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
}


def main() -> None:
    """Measure, print a table, and write a file if one is named."""
    parser = flags(__doc__, rounds=300)
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    found: dict[str, float] = on_ranks(options.ranks, _rank, options)
    for name, ms in found.items():
        print(f"{name:15} {ms:7.2f} ms")
    names = ("layers", "dim", "batch", "ranks", "rounds")
    settings = {name: getattr(options, name) for name in names}
    store(options.out, settings=settings, ms_per_step=found)


def _rank(options: Namespace) -> dict[str, float]:
    warnings.simplefilter("ignore")
    steps = {name: _step(wrap, options) for name, wrap in ARMS.items()}
    seconds = dict.fromkeys(ARMS, math.inf)
    for _, name in turns(steps, options.rounds):
        dist.barrier()
        start = time.perf_counter()
        steps[name]()
        seconds[name] = min(seconds[name], time.perf_counter() - start)
    slowest = torch.tensor(list(seconds.values()))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {name: round(1e3 * s, 3) for name, s in zip(ARMS, slowest.tolist(), strict=True)}


def _step(wrap: Callable[[nn.Module], nn.Module], options: Namespace) -> Callable[[], None]:
    torch.manual_seed(0)
    layers = [nn.Linear(options.dim, options.dim) for _ in range(options.layers)]
    model = wrap(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(options.batch, options.dim)

    def step() -> None:
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
