"""A fused AdamW step of the sharded engines, by turns in one process.

    python benchmarks/adamw.py --out benchmarks/results/YYYYMMDD-adamw-h200.json

The model is B1's, on rank 0 of 8 of the free modelled network. A step is timed from an idle device
until it is idle again.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from shoal.bench.cases import Run
from shoal.bench.engines import ENGINES
from shoal.bench.group import join
from shoal.bench.script import flags, run_of, store, turns
from shoal.bench.workbench import Workbench, build_model

NAMES = ("fsdp1", "fsdp2", "shoal", "shoal-flat", "shoal-wrapper")


def main() -> None:
    """Measure, print a table, and write a file if one is named."""
    parser = flags(__doc__, rounds=16, quick="a tiny model")
    parser.add_argument("--engines", nargs="+", choices=NAMES, default=list(NAMES))
    options = parser.parse_args()
    found = measure(options.engines, options.rounds, quick=options.quick)
    for name, of in found.items():
        print(f"{name:16}" + "".join(f"{key} {value:6.3f}   " for key, value in of.items()))
    settings = {"rounds": options.rounds, "quick": options.quick}
    store(options.out, settings=settings, ms=found)


def measure(names: list[str], rounds: int, *, quick: bool) -> dict[str, dict[str, float]]:
    """Milliseconds of a step, for each engine."""
    runs = [run_of("B1-8", name, quick=quick) for name in names]
    with tempfile.TemporaryDirectory() as folder:
        join(runs[0], 0, Path(folder) / "store")
        benches = {run.engine: _bench(run) for run in runs}
        taken: dict[str, list[float]] = {name: [] for name in names}
        for _, name in turns(benches, rounds):
            taken[name] += benches[name].time_optimizer(1).optimizer_ms
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
