"""A training step of `shoal.replicate` beside torch's DistributedDataParallel, on gloo ranks.

    python benchmarks/replicate.py --out benchmarks/results/replicate.json

The model has many small layers, so that the host's work for each parameter counts. All arms take
turns in the same processes; of all steps the fastest counts, on the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

import shoal.compile  # noqa: F401 - so that torch knows the backend in a source folder
from shoal import replicate
from shoal.bench.host import describe_host


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
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (options, folder), nprocs=options.ranks)
        found: dict[str, float] = json.loads((Path(folder) / "found.json").read_text())
    for name, ms in found.items():
        print(f"{name:15} {ms:7.2f} ms")
    if options.out is not None:
        names = ("layers", "dim", "batch", "ranks", "rounds")
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": asdict(describe_host()),
            "settings": {name: getattr(options, name) for name in names},
            "ms_per_step": found,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")


def _rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks
    )
    steps = {name: _step(wrap, options) for name, wrap in ARMS.items()}
    seconds = dict.fromkeys(ARMS, math.inf)
    for _ in range(options.rounds):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    slowest = torch.tensor(list(seconds.values()))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        found = {name: round(1e3 * s, 3) for name, s in zip(ARMS, slowest.tolist(), strict=True)}
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.barrier()


def _step(
    wrap: Callable[[nn.Module], nn.Module], options: argparse.Namespace
) -> Callable[[], None]:
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
