"""Plans chosen for 200 random budgets, against a pool of plans that were all rehearsed.

    python benchmarks/budgets.py --slice 1/5 --out dense.json      # one model per slice
    python benchmarks/budgets.py --merge dense.json ... --out all.json
    python benchmarks/budgets.py --tiny                            # on a CPU: shows that it runs

For each of 5 models 20 plans are forecast, and rehearsed once, each in a process of its own. For a
budget the forecast chooses the fastest plan that it says fits. It is right if that plan fits, and
is at least 95 % as fast as the fastest of the pool that fits. On CUDA each plan that was chosen is
then run in the smallest of its budgets (`set_per_process_memory_fraction`), and must not run out.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from forecast import run_apart
from planned_models import ARCHITECTURES

from shoal.bench.script import store
from shoal.layout import Even, Flat
from shoal.plan import Setup, forecast_setup
from shoal.plan.accelerators import device_here
from shoal.plan.rehearsal import rehearse
from shoal.runtime.policy import MixedPrecisionPolicy

MODELS = ("dense", "experts", "encoder", "tied", "adapters")
POOL = [
    Setup(world=16, layout=layout, checkpointing=checkpointing, reshard=reshard, replicas=replicas)
    for layout, (checkpointing, reshard), replicas in product(
        (Even(), Flat()),
        ((False, None), (False, False), (True, None), (2, None), (3, False)),
        (1, 2),
    )
]
BUDGETS = 200
FAST_ENOUGH = 0.95


def main() -> None:
    """Measure a slice of the models, and judge; or join slices."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--slice", default="1/1", help="which part of the models, as 2/5")
    parser.add_argument("--tiny", action="store_true", help="small models; measures nothing")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="join results")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.one is not None:
        name, _, number = given.one.partition(":")
        print(json.dumps(_measure(name, POOL[int(number)], given)))
        return
    if given.merge is not None:
        models = {
            name: one
            for path in given.merge
            for name, one in json.loads(path.read_text())["models"].items()
        }
    else:
        part, _, parts = given.slice.partition("/")
        names = MODELS[int(part) - 1 :: int(parts)]
        models = {name: _judged(name, given) for name in names}
    summary = {
        "right": {name: one["num_right"] for name, one in models.items()},
        "of": {name: len(one["budgets"]) for name, one in models.items()},
        "failed": [said for one in models.values() for said in one["failed"]],
    }
    print(json.dumps(summary, indent=1))
    store(given.out, tiny=given.tiny, summary=summary, models=models)


def _measure(name: str, setup: Setup, given: argparse.Namespace) -> dict[str, Any]:
    """One plan, in this process; with a limit in so many bytes of the caching allocator's."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        setup = replace(setup, policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    else:
        torch.set_num_threads(1)
    workload = ARCHITECTURES[name].workload(given.tiny)
    found = forecast_setup(workload, setup, device=device_here(kind))
    if given.limit is not None and kind == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(given.limit / total)
    real = rehearse(workload, setup, device_type=kind, num_timed=5)
    return {
        "needed": found.memory.reserved_peak_bytes,
        "step_ms": found.time.step_ms,
        "measured": asdict(real),
    }


def _judged(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """The pool of a model, and how well it was chosen from."""
    pool: list[dict[str, Any]] = []
    failed: list[str] = []
    for number, setup in enumerate(POOL):
        one = _apart(name, number, given, [])
        print(f"{name:10} {setup!s:70} {one.get('error', '')}", file=sys.stderr, flush=True)
        if "error" in one:
            failed.append(f"{name}: {setup}: {one['error']}")
        else:
            pool.append({"number": number, "plan": str(setup), **one})
    budgets = judge(pool, random.Random(name)) if pool else []
    smallest: dict[int, float] = {}
    for one in budgets:
        number = one["chosen"]
        if number is not None:
            smallest[number] = min(smallest.get(number, one["budget"]), one["budget"])
    if torch.cuda.is_available():
        for number, budget in smallest.items():
            again = _apart(name, number, given, ["--limit", str(budget)])
            if "error" in again:
                failed.append(f"{name}: {POOL[number]} in {budget / 1e9:.2f} GB: {again['error']}")
    right = sum(one["is_right"] for one in budgets)
    return {"pool": pool, "budgets": budgets, "num_right": right, "failed": failed}


def _apart(name: str, number: int, given: argparse.Namespace, more: list[str]) -> dict[str, Any]:
    return run_apart(__file__, ["--one", f"{name}:{number}", *(["--tiny"] * given.tiny), *more])


def judge(pool: list[dict[str, Any]], dice: random.Random) -> list[dict[str, Any]]:
    """Choose for random budgets by what was forecast, and look at what was measured."""
    real = {one["number"]: _real(one) for one in pool}
    least, most = (choose(size for size, _ in real.values()) for choose in (min, max))
    found: list[dict[str, Any]] = []
    for _ in range(BUDGETS):
        budget = dice.uniform(0.95 * least, 1.05 * most)
        fitting = [one for one in pool if one["needed"] <= budget]
        chosen = min(fitting, key=lambda one: one["step_ms"])["number"] if fitting else None
        fastest = min((ms for size, ms in real.values() if size <= budget), default=None)
        is_right, speed = chosen is None and fastest is None, None
        if chosen is not None and fastest is not None:
            size, ms = real[chosen]
            speed = fastest / ms
            is_right = size <= budget and speed >= FAST_ENOUGH
        found.append({"budget": budget, "chosen": chosen, "speed": speed, "is_right": is_right})
    return found


def _real(one: dict[str, Any]) -> tuple[int, float]:
    measured = one["measured"]
    return measured["reserved_peak_bytes"] or measured["allocated_peak_bytes"], measured["step_ms"]


if __name__ == "__main__":
    main()
