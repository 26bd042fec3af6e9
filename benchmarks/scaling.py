"""What a step costs the host, against the units, the parameters of a unit, and the ranks.

    python benchmarks/scaling.py --out benchmarks/results/YYYYMMDD-scaling-cpu.json
    python benchmarks/scaling.py --draw benchmarks/results/YYYYMMDD-scaling-cpu.json

One process is rank 0 of N on the free modelled network. Parameters are so small that the host's
work for them is all there is, and a forward adds each to its input. Over the ranks they are larger,
so that every rank has a row and as many bytes are gathered by 8 ranks as by 16,384. Engines take
turns, and each round goes through all points anew; a time is that of the processor, for a forward
and backward, the least of all. Once it has written its memory the network writes nothing more: on a
CPU its copies would count as ours.

Beside the time stands the number of calls of a step, of Python functions and of those in C. Nobody
else on the machine changes it, and on a CPU it tells the host's work from what operators move.
"""

from __future__ import annotations

import cProfile
import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from shoal import fully_shard
from shoal.bench.plot import Panel, svg
from shoal.bench.script import flags, store, turns
from shoal.comm.modelled import init_modelled
from shoal.layout import Flat

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "scaling.svg"
SHARDED: dict[str, Callable[..., object]] = {
    "shoal": fully_shard,
    "shoal-flat": partial(fully_shard, layout=Flat()),
    "fsdp2": torch_fully_shard,
}
ENGINES = ("plain", *SHARDED)
FSDP2_RANKS = 2048
"""The most that FSDP2 is built for: it cuts parameters into a tensor for each rank, for minutes."""
WARMUP, STEPS = 4, 8
TOLERANCE = 1.25
"""How much steeper the end of a line may be than all of it, and how much a constant may grow."""

Point = dict[str, int]
AXES: dict[str, tuple[Point, Sequence[int]]] = {
    "units": ({"params": 4, "ranks": 64, "numel": 64}, [8 << i for i in range(7)]),
    "params": ({"units": 8, "ranks": 64, "numel": 64}, [1, 4, 16, 64, 128, 256, 512]),
    "ranks": ({"units": 16, "params": 4, "numel": 16384}, [*(8 << 2 * i for i in range(6)), 16384]),
}
"""What stays as it is, and the values of what does not."""
TITLES = {"units": "units", "params": "parameters per unit", "ranks": "ranks (N)"}


class Adds(nn.Module):
    """A unit: each parameter is added to the input."""

    def __init__(self, params: int, numel: int, device: str) -> None:
        super().__init__()
        ones = (torch.ones(numel, device=device) for _ in range(params))
        self.weights = nn.ParameterList(nn.Parameter(one) for one in ones)

    def forward(self, x: Tensor) -> Tensor:
        """The sum."""
        for weight in self.weights:
            x = x + weight
        return x


def main() -> None:
    """Measure, or read what was measured; draw it, and say what each engine costs."""
    parser = flags(__doc__, rounds=4, quick="few and small models")
    parser.add_argument("--draw", type=Path, help="measure nothing: draw this file for the page")
    options = parser.parse_args()
    if options.draw is not None:
        found = json.loads(options.draw.read_text(encoding="utf-8"))["figures"]
        PICTURE.parent.mkdir(exist_ok=True)
        PICTURE.write_text(draw(found), encoding="utf-8")
    else:
        torch.set_num_threads(1)
        found = []
        for number, found in enumerate(measure(options.rounds, quick=options.quick), 1):
            store(options.out, rounds=number, quick=options.quick, figures=found)
    print("over the unsharded model")
    for figure in ("ms", "calls"):
        for axis in AXES:
            for engine in SHARDED:
                line = sharding_of(found, axis, engine, figure)
                print(f"{figure:6}{axis:8}{engine:12}{judge(axis, line)}")


def measure(rounds: int, *, quick: bool) -> Iterator[list[dict[str, Any]]]:
    """After each round: milliseconds of each engine at each point, seconds to build its model."""
    points = [
        (axis, {**fixed, axis: value})
        for axis, (fixed, values) in AXES.items()
        for value in (values[:3] if quick else values)
    ]
    found = [{"axis": axis, "at": at, "ms": {}, "calls": {}, "built_s": {}} for axis, at in points]
    for number in range(rounds):
        for one in found:
            init_modelled(one["at"]["ranks"])
            try:
                for name, times in _time_all(one["at"]).items():
                    for engine, value in times.items():
                        one[name][engine] = min(value, one[name].get(engine, math.inf))
            finally:
                dist.destroy_process_group()
                gc.collect()
            print(number, one["at"], one["ms"], flush=True)
        yield found


def _time_all(at: Point) -> Mapping[str, Mapping[str, float]]:
    models: dict[str, nn.Module] = {}
    built_s: dict[str, float] = {}
    for engine in ENGINES:
        if engine == "fsdp2" and at["ranks"] > FSDP2_RANKS:
            continue
        start = time.perf_counter()
        models[engine] = build(engine, at)
        built_s[engine] = round(time.perf_counter() - start, 3)
    steps = {engine: _stepper(model, at["numel"]) for engine, model in models.items()}
    for step in steps.values():
        for _ in range(WARMUP):
            step()
    best = dict.fromkeys(steps, math.inf)
    with patch("shoal.comm.modelled.receive", lambda call, rank, size: None):
        for _, engine in turns(steps, STEPS):
            best[engine] = min(best[engine], steps[engine]())
        calls = {engine: _num_calls(step) for engine, step in steps.items()}
    ms = {engine: round(one, 4) for engine, one in best.items()}
    return {"ms": ms, "calls": calls, "built_s": built_s}


def _num_calls(step: Callable[[], float]) -> int:
    profiler = cProfile.Profile()
    profiler.runcall(step)
    return sum(int(one.callcount) for one in profiler.getstats())


def build(engine: str, at: Point) -> nn.Module:
    """The model by an engine: each of its units, and the root, which has nothing left."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    units = (Adds(at["params"], at["numel"], device) for _ in range(at["units"]))
    model = nn.Sequential(*units)
    if engine == "plain":
        return model
    mesh = init_device_mesh(device, (at["ranks"],))
    shard = SHARDED[engine]
    for unit in model:
        shard(unit, mesh=mesh)
    shard(model, mesh=mesh)
    return model


def _stepper(model: nn.Module, numel: int) -> Callable[[], float]:
    x = torch.zeros(numel, device=next(model.parameters()).device)

    def step() -> float:
        """Milliseconds of the processor until backward returns; the device may still be at work."""
        start = time.process_time()
        model(x).sum().backward()
        elapsed_ms = (time.process_time() - start) * 1e3
        if x.is_cuda:
            torch.cuda.synchronize()
        model.zero_grad()
        return elapsed_ms

    return step


Line = list[tuple[float, float]]


def line_of(found: Sequence[Mapping[str, Any]], axis: str, engine: str, figure: str = "ms") -> Line:
    """A figure of an engine over an axis, where it was measured."""
    of_axis = [one for one in found if one["axis"] == axis and engine in one[figure]]
    return [(one["at"][axis], one[figure][engine]) for one in of_axis]


def sharding_of(
    found: Sequence[Mapping[str, Any]], axis: str, engine: str, figure: str = "ms"
) -> Line:
    """What an engine takes more than the unsharded model."""
    plain = dict(line_of(found, axis, "plain", figure))
    return [(x, value - plain[x]) for x, value in line_of(found, axis, engine, figure)]


def slope_of(line: Line) -> float:
    """Milliseconds for each one more: the straight line with the smallest relative errors."""
    weights = [1 / y**2 for _, y in line]
    total = math.fsum(weights)
    mean_x, mean_y = (
        math.fsum(w * point[i] for w, point in zip(weights, line, strict=True)) / total
        for i in range(2)
    )
    products = zip(weights, line, strict=True)
    terms = [(w * (x - mean_x) * (y - mean_y), w * (x - mean_x) ** 2) for w, (x, y) in products]
    return math.fsum(top for top, _ in terms) / math.fsum(below for _, below in terms)


def judge(axis: str, line: Line) -> str:
    """Linear in units and parameters, with the slope; constant over ranks, or how it grows."""
    (first_x, first), *_, (before_x, before), (last_x, last) = line
    if axis == "ranks":
        growth = last / first
        word = "constant" if growth <= TOLERANCE else "grows"
        return f"{word}: {first:.5g} at {first_x}, {last:.5g} at {last_x} (× {growth:.2f})"
    slope = slope_of(line)
    steeper = (last - before) / (last_x - before_x) / slope
    word = "linear" if steeper <= TOLERANCE else "steeper than linear"
    return f"{word}: {slope:.4g} each, at the end × {steeper:.2f}"


def draw(found: Sequence[Mapping[str, Any]]) -> str:
    """A panel for each axis, as SVG."""
    panels: list[Panel] = []
    for axis, (fixed, _) in AXES.items():
        same = ", ".join(f"{value:,} {name}" for name, value in fixed.items())
        panels.append(
            Panel(
                title=f"against {TITLES[axis]}",
                x_name=TITLES[axis],
                y_name="forward and backward, ms of the host",
                lines={engine: line_of(found, axis, engine) for engine in ENGINES},
                log_x=axis == "ranks",
                note=f"with {same.replace('numel', 'elements each')}",
            )
        )
    return svg(panels)


if __name__ == "__main__":
    main()
