"""What a step of an engine spends its time on: kernels by stream, and the host by function.

    python benchmarks/profile_step.py --case B1-8 --engines plain,shoal,shoal-flat

Kernels are those of a few steps in a row, in ms per step. Each engine has a process of its own.
Host time is Python's, in µs per step and unit, by the time in a function itself.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import multiprocessing
import pstats
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch

from shoal.bench.script import built, run_of
from shoal.bench.workbench import Workbench
from shoal.bench.worker import Stage

NUM_STEPS = 5
GAP_NS = 2000
Table = dict[tuple[str, str], tuple[float, float]]
"""By stream and kernel: ms, and launches, per step."""
Kernel = tuple[int, int, str, str]
"""When it began and ended, in ns, on which stream, and its name."""


def main() -> None:
    """Profile each engine, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", default="B1-8")
    parser.add_argument("--engines", default="plain,shoal,shoal-flat")
    parser.add_argument("--mode", default="eager")
    parser.add_argument("--top", type=int, default=25)
    parser.add_argument("--quick", action="store_true", help="a tiny model: measures nothing")
    parser.add_argument("--traces", type=Path, help="a folder for the kernels of each engine")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for engine in options.engines.split(","):
        parent, child = context.Pipe()
        process = context.Process(target=profile, args=(options, engine, child))
        process.start()
        print(parent.recv(), flush=True)
        process.join()


def profile(options: argparse.Namespace, engine: str, connection: Any) -> None:
    """Build an engine and say what its steps do; the answer is text."""
    run = run_of(options.case, engine, options.mode, quick=options.quick)
    with built(run) as worker:
        worker.answer(Stage.COMPUTE)
        bench = worker.workbench
        parts = [f"== {run}"]
        if run.device_type == "cuda":
            kernels = _record(bench)
            parts.append(_kernels(kernels, options.top))
            if options.traces is not None:
                path = options.traces / f"{options.case}-{engine}.json"
                path.write_text(json.dumps(kernels), encoding="utf-8")
        parts.append(_host(bench, run.case.shape.num_layers + 1, options.top))
    connection.send("\n".join(parts))


def _record(bench: Workbench) -> list[Kernel]:
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        bench.warm_up(NUM_STEPS)
    events = [
        event
        for event in profiler.profiler.kineto_results.events()  # pyright: ignore
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0
    ]
    first = min(event.start_ns() for event in events)
    return [
        (
            event.start_ns() - first,
            event.end_ns() - first,
            str(event.device_resource_id()),
            event.name()[:90],
        )
        for event in events
    ]


def _kernels(kernels: list[Kernel], top: int) -> str:
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    spans: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for start, end, stream, name in kernels:
        found[stream, name][0] += (end - start) / 1e6 / NUM_STEPS
        found[stream, name][1] += 1 / NUM_STEPS
        spans[stream].append((start, end))
    lines: list[str] = []
    every = [span for some in spans.values() for span in some]
    for stream, some in [*sorted(spans.items()), ("any", every)]:
        lines.append(f"stream {stream}: busy {_union_ms(some) / NUM_STEPS:.2f} ms per step")
    first, last = min(start for start, _ in every), max(end for _, end in every)
    lines.append(f"from first to last kernel {(last - first) / 1e6 / NUM_STEPS:.2f} ms per step")
    for (stream, name), (ms, num) in sorted(found.items(), key=lambda one: -one[1][0])[:top]:
        lines.append(f"{ms:9.3f} ms  {num:7.1f} ×  stream {stream:>4}  {name}")
    return "\n".join([*lines, *_gaps(kernels, top)])


def _gaps(kernels: list[Kernel], top: int) -> list[str]:
    """Where the stream with most kernels stands still, by the kernels before and after."""
    streams = Counter(stream for _, _, stream, _ in kernels)
    ((busiest, _),) = streams.most_common(1)
    own = sorted(kernel for kernel in kernels if kernel[2] == busiest)
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for (_, end, _, before), (start, _, _, after) in itertools.pairwise(own):
        if start - end > GAP_NS:
            found[before[:50], after[:50]].append((start - end) / 1e3 / NUM_STEPS)
    lines = [f"gaps of stream {busiest} above {GAP_NS / 1e3:.0f} µs, per step"]
    for (before, after), some in sorted(found.items(), key=lambda one: -sum(one[1]))[:top]:
        lines.append(f"{sum(some):9.1f} µs  {len(some) / NUM_STEPS:5.1f} ×  {before} → {after}")
    return lines


def _union_ms(spans: list[tuple[float, float]]) -> float:
    total = end = 0.0
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e6


def _host(bench: Workbench, num_units: int, top: int) -> str:
    forward, backward = cProfile.Profile(), cProfile.Profile()
    bench.take_apart(NUM_STEPS, forward.runcall, backward.runcall)
    each = NUM_STEPS * num_units
    lines: list[str] = []
    for when, profiler in (("forward", forward), ("backward", backward)):
        stats = pstats.Stats(profiler).stats  # pyright: ignore
        whole = sum(own for _, _, own, _, _ in stats.values()) * 1e6 / each
        lines.append(f"host in {when}: {whole:.0f} µs per step and unit")
        lines.append("  in itself   with calls      calls")
        rows = sorted(stats.items(), key=lambda one: -one[1][2])[:top]
        for (file, line, name), (_, calls, own, all_of_it, _) in rows:
            place = f"{Path(file).name}:{line}" if line else ""
            times = f"{own * 1e6 / each:8.1f} µs {all_of_it * 1e6 / each:9.1f} µs"
            lines.append(f"{times} {calls / each:8.1f} ×  {name} {place}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
