"""The first step of the demo's transformer, compiled cold and from the cache.

    python benchmarks/compile_cache.py --out benchmarks/results/compile-cache.json

Every measurement is a fresh process, which has imported torch and Dynamo before the clock starts.
Cold ones have an empty cache of ours, and of Inductor's where that is the inner compiler; warm ones
find both filled. They take turns, and of all rounds the fastest counts. `first step` is a forward
and backward with everything that is compiled for it, `step` a later one without, `compile` their
difference. Of that, `ours` is what the stages of shoal's compiler took, the inner compiler
included; the rest is Dynamo's, which reads the program and makes guards in every process anew.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from typing import Any

from shoal.bench.script import flags, store
from shoal.train.config import ModelConfig
from shoal.train.model import Transformer, next_token_loss

BATCH = 8
INNER = ("direct", "inductor")
SECONDS = ("first_step_s", "step_s", "compile_s", "ours_s", "dynamo_s")


def main() -> None:
    """Measure, print a table, and write a file if one is named."""
    parser = flags(__doc__, rounds=5)
    parser.add_argument("--inner", choices=INNER, nargs="+", default=list(INNER))
    parser.add_argument("--measure", choices=INNER, help="measure once, in this process")
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(_measure(options.measure)))
        return
    found = {inner: _rounds(inner, options.rounds) for inner in options.inner}
    print(f"{'inner':10}{'':8}" + "".join(f"{name[:-2]:>14}" for name in SECONDS))
    for inner, of in found.items():
        for how in ("cold", "warm", "ratio"):
            print(f"{inner:10}{how:8}" + "".join(f"{of[how][name]:14.2f}" for name in SECONDS))
    model = asdict(ModelConfig())
    settings = {"rounds": options.rounds, "threads": 1, "batch": BATCH, "model": model}
    store(options.out, settings=settings, results=found)


def _rounds(inner: str, rounds: int) -> dict[str, Any]:
    """Cold and warm in turns; the fastest of each."""
    taken: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for how, use in (("cold", "stored"), ("warm", "hit")):
                one = _in_process(inner, folder)
                if one["cache"] != use:
                    raise RuntimeError(f"expected a {how} compilation to be {use}; got {one}")
                taken[how].append(one)
    cold, warm = (min(taken[how], key=lambda one: one["first_step_s"]) for how in taken)
    ratio = {name: warm[name] / cold[name] for name in SECONDS}
    return {"cold": cold, "warm": warm, "ratio": ratio, "rounds": taken}


def _in_process(inner: str, folder: str) -> dict[str, Any]:
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "SHOAL_CACHE_DIR": f"{folder}/shoal",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
    }
    command = [sys.executable, __file__, "--measure", inner]
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def _measure(inner: str) -> dict[str, Any]:
    import torch
    import torch._dynamo

    from shoal.compile import backend
    from shoal.compile.observe import records

    gc.freeze()  # as ranks of the trainer do
    torch.manual_seed(0)
    config = ModelConfig()
    model = Transformer(config)
    tokens = torch.randint(0, 256, (BATCH, config.context))
    compiled = torch.compile(model, backend=backend.shoal, options={"inner": inner})

    def step() -> float:
        start = time.perf_counter()
        next_token_loss(compiled(tokens), tokens).backward()
        return time.perf_counter() - start

    next_token_loss(model(tokens), tokens).backward()  # so that no operator runs for the first time
    first = step()
    later = min(step() for _ in range(3))
    (record,) = records()
    ours = record.total_seconds
    return {
        "first_step_s": first,
        "step_s": later,
        "compile_s": first - later,
        "ours_s": ours,
        "dynamo_s": first - later - ours,
        "cache": str(record.cache),
        "stages_s": dict(record.seconds),
    }


if __name__ == "__main__":
    main()
