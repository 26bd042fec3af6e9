"""The first step of a whole model: compiled cold and warm, beside torch.compile of the same model.

    python benchmarks/compile_time.py --out benchmarks/results/YYYYMMDD-compile-time-h200.json
    python benchmarks/compile_time.py --quick --layers 8,16 --out ...    # small, on a CPU

Engines are those of `shoal bench`: `plain` is torch.compile of the unsharded model, `shoal-graph`
the sharded one as one graph with its collectives. Each measurement is a fresh process. A cold one
has empty caches of ours and of Inductor's, a warm one finds both filled. `compile` is the first
step less a later one: by the clock, and by processor time, Inductor's own processes included,
which holds on a machine with other work too. Engines take turns; of all rounds the fastest counts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from shoal.bench.cases import CASES, Mode, Run, device_type_of
from shoal.bench.engines import ENGINES
from shoal.bench.host import describe_host

COLUMNS = ("first_step_s", "step_s", "compile_s", "compile_cpu_s")
HOW = ("cold", "warm")


def main() -> None:
    """Measure, print a table, and write a file if one is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", default="B1-8", choices=[case.name for case in CASES])
    parser.add_argument("--engines", default="plain,plain-shoal,shoal-graph")
    parser.add_argument("--layers", default="", help="numbers of layers instead of the case's")
    parser.add_argument("--quick", action="store_true", help="the case scaled down, for a CPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    parser.add_argument("--measure", action="store_true", help="measure once, in this process")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options)))
        return
    found: dict[str, Any] = {}
    print(f"{'layers':>6} {'engine':14}{'':6}" + "".join(f"{name:>16}" for name in COLUMNS))
    for layers in options.layers.split(","):
        for engine, of in rounds(options, layers).items():
            found[f"{layers or 'all'} {engine}"] = of
            for how in HOW:
                figures = "".join(f"{of[how][name]:16.2f}" for name in COLUMNS)
                print(f"{layers or 'all':>6} {engine:14}{how:6}{figures}", flush=True)
    if options.out is not None:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": asdict(describe_host()),
            "settings": {"case": options.case, "quick": options.quick, "rounds": options.rounds},
            "results": found,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")


def rounds(options: argparse.Namespace, layers: str) -> dict[str, Any]:
    """Of each engine the fastest cold and the fastest warm start, by turns."""
    taken: dict[str, dict[str, list[dict[str, float]]]] = {}
    for _ in range(options.rounds):
        for engine in options.engines.split(","):
            with tempfile.TemporaryDirectory() as folder:
                for how in HOW:
                    one = in_process(options, engine, layers, Path(folder))
                    taken.setdefault(engine, {}).setdefault(how, []).append(one)
    return {
        engine: {how: min(of[how], key=lambda one: one["compile_s"]) for how in HOW}
        for engine, of in taken.items()
    }


def in_process(
    options: argparse.Namespace, engine: str, layers: str, folder: Path
) -> dict[str, float]:
    """Measure in a process that finds caches in a folder, and leaves them there."""
    env = {
        **os.environ,
        "SHOAL_CACHE_DIR": str(folder / "shoal"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    command = [sys.executable, __file__, "--measure", "--case", options.case]
    command += ["--engines", engine, "--layers", layers, *(["--quick"] if options.quick else [])]
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


@dataclass(frozen=True, slots=True)
class Clock:
    """Two clocks, read together."""

    wall_s: float
    cpu_s: float

    @classmethod
    def read(cls) -> Clock:
        """Now."""
        own = resource.getrusage(resource.RUSAGE_SELF)
        others = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = sum(one.ru_utime + one.ru_stime for one in (own, others))
        return cls(time.perf_counter(), used)

    def since(self, start: Clock) -> Clock:
        """What has passed."""
        return Clock(self.wall_s - start.wall_s, self.cpu_s - start.cpu_s)


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Take first and later steps of one engine."""
    from shoal.bench.group import join
    from shoal.bench.workbench import Workbench, build_model

    case = next(case for case in CASES if case.name == options.case)
    case = case.quickly() if options.quick else case
    if options.layers:
        case = replace(case, shape=replace(case.shape, num_layers=int(options.layers)))
    run = Run(
        case=case,
        engine=options.engines,
        mode=Mode.COMPILED,
        device_type=device_type_of(case, cuda=not options.quick),
    )
    engine = ENGINES[run.engine]
    if run.device_type == "cuda":
        torch.cuda.set_device(run.device)
    else:
        torch.set_num_threads(1)
        # Where there are processes of its own to compile, their time is known when they end.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        if engine.uses_group:
            join(run, 0, Path(folder) / "store")
        workbench = Workbench(run, engine.wrap(build_model(run), run))
        spans: list[Clock] = []
        for _ in range(4):
            start = Clock.read()
            workbench.warm_up(1)  # reads the loss, so that the device is done
            spans.append(Clock.read().since(start))
    first, later = spans[0], min(spans[1:], key=lambda span: span.wall_s)
    return {
        "first_step_s": first.wall_s,
        "step_s": later.wall_s,
        "compile_s": first.wall_s - later.wall_s,
        "compile_cpu_s": first.cpu_s - later.cpu_s,
    }


if __name__ == "__main__":
    main()
