"""`fully_shard` with large parameters gathered in place, beside one gather that is copied out of.

    python benchmarks/sections.py --out benchmarks/results/FILE.json

Two gloo ranks of one thread, three units of two 2048 × 2048 matrices; forward+backward in turns.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from shoal import fully_shard
from shoal.bench.host import describe_host
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


def run(rank: int, folder: str, rounds: int) -> None:
    """Step all variants by turns; rank 0 writes the times."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    models = {name: build(limit) for name, limit in LIMITS.items()}
    x = torch.randn(16, DIM)
    times: dict[str, list[float]] = {name: [] for name in models}
    for number in range(rounds + 1):
        for name, model in list(models.items())[:: 1 if number % 2 else -1]:
            dist.barrier()
            start = perf_counter()
            loss = model(x).square().mean()
            loss.backward()
            elapsed_ms = (perf_counter() - start) * 1e3
            assert torch.isfinite(loss)
            model.zero_grad()
            if number:  # the first one warms up
                times[name].append(elapsed_ms)
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps(times), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    """Measure, print a table, and write a file if one is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (folder, options.rounds), nprocs=2)
        times = json.loads(Path(folder, "times.json").read_text(encoding="utf-8"))
    for name, some in times.items():
        print(f"{name:12} median {statistics.median(some):7.1f} ms, quietest {min(some):7.1f} ms")
    if options.out is not None:
        content = {
            "command": shlex.join(["python", *sys.argv]),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": asdict(describe_host()),
            "forward_backward_ms": times,
        }
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
