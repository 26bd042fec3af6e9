"""`shoal rehearse`: some steps of the real engine here, as rank 0 of N, beside the forecast."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table

from shoal.cli.flags import Parser
from shoal.cli.plan import Planned, add_planning_flags, naming_gaps
from shoal.plan import Forecast, forecast_setup
from shoal.plan.accelerators import device_here
from shoal.plan.rehearsal import Rehearsal, rehearse
from shoal.report.number_format import digits, size
from shoal.train.safe_stream import safe_stdout

WRONG = 0.1
"""A forecast that is further off is said to be so."""


def make_parser() -> Parser:
    """Build the parser of `shoal rehearse`."""
    parser = Parser(
        prog="shoal rehearse",
        description="Run some steps of the real engine on this machine's device as rank 0 of N, on "
        "a modelled network,\nand set memory and time beside the forecast. FILE is as in `shoal "
        "plan`.",
    )
    add_planning_flags(parser)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--on", choices=("cpu", "cuda"), default=here, help=f"rehearse on ({here})")
    parser.add_argument(
        "--device", metavar="NAME", help="the device of the forecast (the one here)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(argv: Sequence[str]) -> int:
    """Forecast, rehearse, and print both; 0 whatever the difference is."""
    given = make_parser().parse(argv)
    given.device = given.device or device_here(given.on)
    with naming_gaps():
        source = Planned.of(given)
    found = forecast_setup(
        source.workload, source.setup, device=given.device, network=given.network
    )
    shows = sys.stderr.isatty()
    real = rehearse(
        source.workload,
        source.setup,
        device_type=given.on,
        network=given.network,
        progress=_say if shows else lambda said: None,
    )
    if given.json:
        both = {"forecast": found.to_json(), "rehearsal": asdict(real)}
        print(json.dumps({**both, "compared": [asdict(one) for one in compare(found, real)]}))
    else:
        show(found, real, Console(file=safe_stdout(), markup=False, emoji=False, soft_wrap=True))
    return 0


def _say(said: str) -> None:
    print(f"\r\033[K{said}", end="", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure, as it was forecast and as it was measured."""

    name: str
    forecast: float
    measured: float

    @property
    def off(self) -> float:
        """By what part of what was measured the forecast is off."""
        return self.forecast / self.measured - 1 if self.measured else 0.0


def compare(found: Forecast, real: Rehearsal) -> list[Compared]:
    """The figures that both have."""
    memory, time = found.memory, found.time
    pairs = [
        ("allocated_peak_bytes", memory.allocated_peak_bytes, real.allocated_peak_bytes),
        ("reserved_peak_bytes", memory.reserved_peak_bytes, real.reserved_peak_bytes),
        ("step_ms", time.step_ms, real.step_ms),
        ("forward_backward_ms", time.forward_backward_ms, real.forward_backward_ms),
    ]
    return [
        Compared(name=name, forecast=forecast, measured=measured)
        for name, forecast, measured in pairs
        if measured is not None
    ]


def show(found: Forecast, real: Rehearsal, console: Console) -> None:
    """Print both side by side, and what is off."""
    console.print(f"{found.plan}, network {found.network}, on {real.device}")
    console.print()
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("forecast", "rehearsal", "off"):
        table.add_column(name, justify="right")
    compared = compare(found, real)
    for one in compared:
        name, _, unit = one.name.rpartition("_")
        said = [
            size(value) if unit == "bytes" else f"{digits(value)} ms"
            for value in (one.forecast, one.measured)
        ]
        table.add_row(name.replace("_", " "), *said, f"{one.off:+.1%}")
    console.print(table)
    console.print()
    for one in compared:
        if abs(one.off) > WRONG:
            console.print(f"The forecast of {one.name} is off by {one.off:+.0%}.")
    for assumption in found.assumptions:
        console.print(f"- {assumption}")
