"""Profile a step: what the engine did, when, and how many bytes it moved.

    torchrun --nproc-per-node 2 examples/profile_step.py --trace /tmp/trace

`plan_of` tells what a step will do, before it runs. `watch` records what it did. torch's profiler
shows the operators between; its trace opens in Perfetto or in chrome://tracing.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from start import Model, batch, join_ranks
from torch.nn import functional as F

from shoal import fully_shard
from shoal.fsdp import plan_of
from shoal.runtime.observe import watch
from shoal.runtime.recorder import Recorder


def step(model: Model, number: int) -> None:
    """Forward and backward of one step."""
    x, y = batch(number)
    F.cross_entropy(model(x), y).backward()


def time_by_kind(recorder: Recorder) -> dict[str, float]:
    """How long the actions of each kind took, in microseconds."""
    took: dict[str, float] = defaultdict(float)
    for action in recorder.actions():
        took[str(action.kind)] += action.duration_us
    return dict(took)


def main(trace: Path | None = None) -> tuple[str, Recorder]:
    """Print the plan of a step, and the record of one; return both."""
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    step(model, 0)  # the first step also sets things up

    plan = plan_of(model)  # orders, bytes and peak memory, without running anything
    with watch(model) as recorder:
        step(model, 1)
    if dist.get_rank() == 0:
        print(plan)
        print(recorder)
        for kind, took_us in sorted(time_by_kind(recorder).items(), key=lambda one: -one[1]):
            print(f"{kind:>12} {took_us:9.0f} us")

    if trace is not None:
        with torch.profiler.profile() as profiler:
            step(model, 2)
        trace.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace / f"rank-{dist.get_rank()}.json"))
    return str(plan), recorder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, help="a folder for traces of torch's profiler")
    given = parser.parse_args()
    join_ranks()
    main(given.trace)
    dist.destroy_process_group()
