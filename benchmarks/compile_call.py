"""What a call of a tiny compiled function costs on the host, by turns in one process.

    python benchmarks/compile_call.py --out benchmarks/results/YYYYMMDD-compile-call-cpu.json

`eager` is Dynamo alone: guards, and the program's own operators. `aot_eager` is torch's runtime
around the same operators, `shoal` is ours, with all checks on. Of many short rounds, in which each
has its turn, the fastest counts. Training is a forward and a backward, inference a forward without
autograd.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import FunctionType

import torch
from torch import Tensor, nn

from shoal.bench.script import flags, store
from shoal.compile.aot.frame_stack import called_on_own_stack

BACKENDS = ("eager", "aot_eager", "shoal")
CALLS = 20
WIDTH = 8


class Scale(nn.Module):
    """One operator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return x * self.weight


def linear() -> nn.Module:
    """A layer and what follows it."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())


def perceptron() -> nn.Module:
    """Three layers."""
    return nn.Sequential(linear(), linear(), nn.Linear(WIDTH, WIDTH))


def normalised() -> nn.Module:
    """Buffers that are written to."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())


def dropped() -> nn.Module:
    """Random numbers."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))


PROGRAMS: dict[str, Callable[[], nn.Module]] = {
    "one operator": Scale,
    "linear": linear,
    "perceptron": perceptron,
    "batch norm": normalised,
    "dropout": dropped,
}


def main() -> None:
    """Measure, print a table, and write a file if one is named."""
    parser = flags(__doc__, rounds=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: measure(build, options.rounds) for name, build in PROGRAMS.items()}
    print(f"{'':14}{'us':12}" + "".join(f"{name:>11}" for name in BACKENDS))
    for program, of in found.items():
        train, infer = of["training"], of["inference"]
        ratio, more = train["shoal"] / train["aot_eager"], infer["shoal"] - infer["eager"]
        for how, row, said in (
            ("training", train, f"{ratio:.2f} x aot_eager"),
            ("inference", infer, f"{more:+.1f} us to Dynamo alone"),
        ):
            print(f"{program:14}{how:12}" + "".join(f"{t:11.1f}" for t in row.values()), said)
    settings = {"rounds": options.rounds, "calls": CALLS, "threads": 1, "width": WIDTH}
    store(options.out, settings=settings, us=found)


def measure(build: Callable[[], nn.Module], rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of a call, for training and inference and each backend."""
    x = torch.randn(4, WIDTH)
    ones = torch.ones(4, WIDTH)
    training: dict[str, Callable[[], object]] = {}
    inference: dict[str, Callable[[], object]] = {}
    for backend in BACKENDS:
        torch.manual_seed(0)
        training[backend] = _trains(_compiled(build(), backend), x, ones)
        inference[backend] = _infers(_compiled(build().eval(), backend), x)
    return {"training": _by_turns(training, rounds), "inference": _by_turns(inference, rounds)}


def _compiled(model: nn.Module, backend: str) -> Callable[..., Tensor]:
    def call(x: Tensor) -> Tensor:
        return model(x)

    # Dynamo keeps graphs by code object, and looks through those of all backends.
    code = call.__code__.replace(co_name=f"call_{backend}")
    own = FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
    return torch.compile(own, backend=backend, fullgraph=True)


def _trains(model: Callable[..., Tensor], x: Tensor, ones: Tensor) -> Callable[[], object]:
    return lambda: model(x).backward(ones)


def _infers(model: Callable[..., Tensor], x: Tensor) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return model(x)

    return call


def _by_turns(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        for _ in range(3):
            call()
    # None of them is to be unlucky with where its frames come to lie.
    timed = called_on_own_stack(lambda calls: [_time(call) for call in calls], num_values=4096)
    for _ in range(rounds):
        for name, took in zip(calls, timed(list(calls.values())), strict=True):
            best[name] = min(best[name], took)
    return best


def _time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


if __name__ == "__main__":
    main()
