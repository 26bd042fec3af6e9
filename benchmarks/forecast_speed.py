"""What a forecast and a search cost on a CPU, for Llama 3 of 8B, 70B and 405B.

    python benchmarks/forecast_speed.py --out benchmarks/results/YYYYMMDD-forecast-speed-cpu.json

Each is a `shoal plan` of its own. `cpu_s` is processor time, imports included, of which
`import_cpu_s` are those; `wall_s` depends on what else the machine does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from shoal.bench.script import flags, store

FILE = Path(__file__).with_name("llama.py")
FORECASTS = [
    *((model, world) for model in ("8B", "70B") for world in (8, 64, 1024)),
    ("405B", 16384),
]
SEARCHES = [("8B", 64, "80GB"), ("70B", 256, "80GB")]


def main() -> None:
    """Measure, print, and write a file if one is named."""
    given = flags(__doc__).parse_args()
    imports, _ = _cost([sys.executable, "-c", "import shoal.cli.plan"])
    print(f"import {imports['cpu_s']} s")
    forecasts = [_forecast(model, world) for model, world in FORECASTS]
    searches = [_search(*one) for one in SEARCHES]
    store(given.out, import_cpu_s=imports["cpu_s"], forecasts=forecasts, searches=searches)


def _forecast(model: str, world: int) -> dict[str, Any]:
    words = ["--world", str(world), "--checkpointing"]
    cost, found = _plan(model, words)
    told = {"model": model, "world": world, **cost, "step_ms": found["time"]["step_ms"]}
    told["reserved_peak_bytes"] = found["memory"]["reserved_peak_bytes"]
    print(told, flush=True)
    return told


def _search(model: str, world: int, budget: str) -> dict[str, Any]:
    words = ["--world", str(world), "--fit", budget, "--global-batch", "4M"]
    cost, found = _plan(model, words)
    told = {
        **{"model": model, "world": world, "budget": budget, **cost},
        **{"plans": len(found["plans"]), "chosen": found["chosen"]},
        "asked": sum(one["needed_bytes"] is not None for one in found["plans"]),
    }
    print(told, flush=True)
    return told


def _plan(model: str, words: list[str]) -> tuple[dict[str, float], dict[str, Any]]:
    command = [sys.executable, "-m", "shoal", "plan", str(FILE), *words, "--json"]
    cost, out = _cost(command, LLAMA=model)
    return cost, json.loads(out)


def _cost(command: list[str], **environment: str) -> tuple[dict[str, float], str]:
    """Processor time, time by the clock, and the most memory of a command; and what it printed."""
    began = time.perf_counter()
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    out = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    cost = {
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "wall_s": round(time.perf_counter() - began, 2),
        "gib": round(used.ru_maxrss / (1 << 20), 3),
    }
    return cost, out


if __name__ == "__main__":
    main()
