"""Steps that gather one, two or three units ahead, by turns in one process: time and memory.

The memory of gathers is kept apart from all other, as in timed steps of `shoal bench`: reserved
memory is to be compared between the depths alone.

python benchmarks/prefetch_depth.py --cases B2,B5 --rounds 5 --out benchmarks/results/FILE.json
"""

from __future__ import annotations

import statistics
from typing import Any

from shoal.bench.cases import Run
from shoal.bench.script import built, flags, run_of, store, turns
from shoal.bench.worker import Stage

DEPTHS = (1, 2, 3)


def main() -> None:
    """Measure each case, print a table, and write a file if one is named."""
    parser = flags(__doc__, rounds=5, quick="tiny models")
    parser.add_argument("--cases", default="B2,B5")
    parser.add_argument("--engine", default="shoal")
    options = parser.parse_args()
    figures: list[dict[str, Any]] = []
    for name in options.cases.split(","):
        run = run_of(name, options.engine, quick=options.quick)
        figures += measure(run, options.rounds)
    print(f"{'case':6} {'ahead':>5} {'median ms':>10} {'quietest':>9} {'reserved GiB':>13}")
    for one in figures:
        times = one["forward_backward_ms"]
        print(
            f"{one['case']:6} {one['depth']:5} {statistics.median(times):10.2f} {min(times):9.2f} "
            f"{one['reserved_gib']:13.2f}"
        )
    store(options.out, figures=figures)


def measure(run: Run, rounds: int) -> list[dict[str, Any]]:
    """The medians of each round, and the memory of steps, for each depth."""
    times: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    reserved: dict[int, float] = {}
    with built(run) as worker:
        bench = worker.workbench
        model: Any = bench.model
        for _, depth in turns(DEPTHS, rounds):
            model.set_prefetch_depth(depth)
            bench.rest()
            bench.warm_up(3)
            if depth not in reserved:
                reserved[depth] = bench.measure_memory(3).reserved_gib or 0.0
            reply: Any = worker.answer(Stage.COMPUTE)  # which looks at the values too
            times[depth].append(statistics.median(reply.forward_backward_ms))
    return [
        {
            "case": run.case.name,
            "engine": run.engine,
            "depth": depth,
            "forward_backward_ms": times[depth],
            "reserved_gib": reserved[depth],
        }
        for depth in DEPTHS
    ]


if __name__ == "__main__":
    main()
