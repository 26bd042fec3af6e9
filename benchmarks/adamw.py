"""A fused AdamW step of the sharded engines, by turns in one process.

    python benchmarks/adamw.py --out benchmarks/results/YYYYMMDD-adamw-h200.json

The model is B1's, on rank 0 of 8 of the free modelled network. A step is timed from an idle device
until it is idle again.
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

import torch

from shoal.bench.cases import CASES, Mode, Run
from shoal.bench.engines import ENGINES
from shoal.bench.group import join
from shoal.bench.host import describe_host
from shoal.bench.workbench import Workbench, build_model

NAMES = ("fsdp1", "fsdp2", "shoal", "shoal-flat", "shoal-wrapper")


def main() -> None:
    """Measure, print a table, and write a file if one is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engines", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    options = parser.parse_args()
    found = measure(options.engines, options.rounds, quick=options.quick)
    for name, of in found.items():
        print(f"{name:16}" + "".join(f"{key} {value:6.3f}   " for key, value in of.items()))
    if options.out is not None:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": asdict(describe_host()),
            "settings": {"rounds": options.rounds, "quick": options.quick},
            "ms": found,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")


def measure(names: list[str], rounds: int, *, quick: bool) -> dict[str, dict[str, float]]:
    """Milliseconds of a step, for each engine."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    case = CASES[0].quickly() if quick else CASES[0]
    runs = [Run(case=case, engine=n, mode=Mode.EAGER, device_type=device_type) for n in names]
    with tempfile.TemporaryDirectory() as folder:
        join(runs[0], 0, Path(folder) / "store")
        benches = {run.engine: _bench(run) for run in runs}
        taken: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds):
            for name, bench in benches.items():
                taken[name] += bench.time_optimizer(1).optimizer_ms
    return {
        name: {"median": statistics.median(of), "fastest": min(of)} for name, of in taken.items()
    }


def _bench(run: Run) -> Workbench:
    bench = Workbench(run, ENGINES[run.engine].wrap(build_model(run), run))
    bench.warm_up(4)
    bench.time_optimizer(2)  # which makes the optimizer's state
    return bench


if __name__ == "__main__":
    main()
