"""Forecasts against rehearsals: 8 architectures, 5 plans each.

    python benchmarks/forecast.py --slice 1/3 --out first.json     # then 2/3 and 3/3
    python benchmarks/forecast.py --merge first.json second.json third.json --out all.json
    python benchmarks/forecast.py --tiny                           # on a CPU: shows that it runs

Each pair has a process of its own. In it a forecast is made from meta tensors; then the real
engine takes some steps as rank 0 of N on the modelled network (`shoal rehearse`). `scatter` in the
file has a point for each pair and figure: x is measured, y forecast.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from planned_models import ARCHITECTURES

from shoal.bench.script import store
from shoal.cli.rehearse import compare
from shoal.layout import Flat
from shoal.plan import Setup, forecast_setup
from shoal.plan.accelerators import device_here
from shoal.plan.rehearsal import rehearse
from shoal.runtime.policy import MixedPrecisionPolicy

PLANS = (
    Setup(world=8),
    Setup(world=64, prefetch_depth=2, blocks_per_unit=2),
    Setup(world=64, replicas=8, checkpointing=True),
    Setup(world=1024, layout=Flat(), checkpointing=2, reshard=False),
    Setup(world=8, layout=Flat(), micro_batches=4, reshard=False),
)
TIMEOUT_S = 150


def main() -> None:
    """Measure a slice, and write it; or join slices."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--slice", default="1/1", help="which part of the pairs, as 2/3")
    parser.add_argument("--tiny", action="store_true", help="small models; measures nothing")
    parser.add_argument("--models", help=f"of {','.join(ARCHITECTURES)}")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="join results")
    parser.add_argument("--pair", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.pair is not None:
        name, _, number = given.pair.partition(":")
        print(json.dumps(measure(name, PLANS[int(number)], is_tiny=given.tiny)))
        return
    if given.merge is not None:
        found = [pair for path in given.merge for pair in json.loads(path.read_text())["pairs"]]
    else:
        found = _slice(given)
    summary = summarise(found)
    print(json.dumps(summary, indent=1))
    store(given.out, tiny=given.tiny, summary=summary, pairs=found, scatter=scatter(found))


def _slice(given: argparse.Namespace) -> list[dict[str, Any]]:
    names = given.models.split(",") if given.models else list(ARCHITECTURES)
    pairs = [(name, number) for name in names for number in range(len(PLANS))]
    part, _, parts = given.slice.partition("/")
    found: list[dict[str, Any]] = []
    for name, number in pairs[int(part) - 1 :: int(parts)]:
        began = time.perf_counter()
        one = run_apart(__file__, ["--pair", f"{name}:{number}", *(["--tiny"] * given.tiny)])
        one = {"model": name, "plan": str(PLANS[number]), **one}
        found.append(one)
        took = time.perf_counter() - began
        said = one.get("off") or one.get("error")
        print(f"{name:10} {one['plan']:60} {took:5.1f} s  {said}", file=sys.stderr, flush=True)
    return found


def run_apart(script: str, words: list[str]) -> dict[str, Any]:
    """What a process of its own printed as JSON in its last line, or why it did not."""
    try:
        done = subprocess.run(
            [sys.executable, script, *words], capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {TIMEOUT_S} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["?"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def measure(name: str, setup: Setup, *, is_tiny: bool) -> dict[str, Any]:
    """One pair, in this process."""
    on_cuda = torch.cuda.is_available()
    kind = "cuda" if on_cuda else "cpu"
    if not on_cuda:
        torch.set_num_threads(1)
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if on_cuda else setup.policy
    setup = replace(setup, policy=half)
    workload = ARCHITECTURES[name].workload(is_tiny)
    began = time.process_time()
    found = forecast_setup(workload, setup, device=device_here(kind))
    forecast_s = time.process_time() - began
    real = rehearse(workload, setup, device_type=kind)
    return {
        "forecast": found.to_json(),
        "forecast_cpu_s": round(forecast_s, 2),
        "measured": asdict(real),
        "off": {one.name: round(one.off, 5) for one in compare(found, real)},
    }


def summarise(found: list[dict[str, Any]]) -> dict[str, Any]:
    """How far forecasts are off, by figure: the median and the worst."""
    offs: dict[str, list[float]] = {}
    for one in found:
        for name, off in one.get("off", {}).items():
            offs.setdefault(name, []).append(abs(off))
    figures = {
        name: {"median": sorted(some)[len(some) // 2], "worst": max(some), "num": len(some)}
        for name, some in offs.items()
    }
    failed = [f"{one['model']}: {one['plan']}: {one['error']}" for one in found if "error" in one]
    return {"off": figures, "failed": failed}


def scatter(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The points of the plot."""
    return [
        {
            "model": one["model"],
            "plan": one["plan"],
            "figure": name,
            "x": one["measured"][name],
            "y": one["forecast"][group][name],
        }
        for one in found
        if "off" in one
        for name, group in (
            ("allocated_peak_bytes", "memory"),
            ("reserved_peak_bytes", "memory"),
            ("step_ms", "time"),
            ("forward_backward_ms", "time"),
        )
        if one["measured"][name] is not None
    ]


if __name__ == "__main__":
    main()
