"""Steps that gather one, two or three units ahead, by turns in one process: time and memory.

The memory of gathers is kept apart from all other, as in timed steps of `shoal bench`: reserved
memory is to be compared between the depths alone.

python benchmarks/prefetch_depth.py --cases B2,B5 --rounds 5 --out benchmarks/results/FILE.json
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
from typing import Any

import torch

from shoal.bench.cases import CASES, Mode, Run
from shoal.bench.host import describe_host
from shoal.bench.worker import Stage, _Worker

DEPTHS = (1, 2, 3)


def main() -> None:
    """Measure each case, print a table, and write a file if one is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", default="B2,B5")
    parser.add_argument("--engine", default="shoal")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="tiny models: measures nothing")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    options = parser.parse_args()
    figures: list[dict[str, Any]] = []
    for name in options.cases.split(","):
        case = next(case for case in CASES if case.name == name)
        figures += measure(case.quickly() if options.quick else case, options)
    print(f"{'case':6} {'ahead':>5} {'median ms':>10} {'quietest':>9} {'reserved GiB':>13}")
    for one in figures:
        times = one["forward_backward_ms"]
        print(
            f"{one['case']:6} {one['depth']:5} {statistics.median(times):10.2f} {min(times):9.2f} "
            f"{one['reserved_gib']:13.2f}"
        )
    if options.out is not None:
        command = shlex.join(["python", *sys.argv])
        created = datetime.now(UTC).isoformat(timespec="seconds")
        host = asdict(describe_host())
        content = {"command": command, "created": created, "host": host, "figures": figures}
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def measure(case: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The medians of each round, and the memory of steps, for each depth."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = Run(case=case, engine=options.engine, mode=Mode.EAGER, device_type=device)
    times: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    reserved: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        worker = _Worker(run, 0, Path(folder))
        worker.answer(Stage.BUILD)
        bench = worker._workbench
        assert bench is not None
        model: Any = bench._model
        for number in range(options.rounds):
            for depth in DEPTHS[:: 1 if number % 2 == 0 else -1]:
                model.set_prefetch_depth(depth)
                bench.rest()
                bench.warm_up(3)
                if depth not in reserved:
                    reserved[depth] = bench.measure_memory(3).reserved_gib or 0.0
                reply: Any = worker.answer(Stage.COMPUTE)  # which looks at the values too
                times[depth].append(statistics.median(reply.forward_backward_ms))
    torch.distributed.destroy_process_group()
    return [
        {
            "case": case.name,
            "engine": options.engine,
            "depth": depth,
            "forward_backward_ms": times[depth],
            "reserved_gib": reserved[depth],
        }
        for depth in DEPTHS
    ]


if __name__ == "__main__":
    main()
