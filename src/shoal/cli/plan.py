"""`shoal plan`: what a run will need, before it runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal.cli.flags import Parser
from shoal.layout import Even, Flat, Layout, Rows, Whole
from shoal.plan.accelerators import ACCELERATORS
from shoal.plan.forecast import Forecast, forecast
from shoal.plan.plan_file import read_plan_file
from shoal.train.safe_stream import safe_stdout

GIB = 1 << 30
BAR = 24
LAYOUTS: Mapping[str, type[Layout]] = {
    "even": Even,
    "flat": Flat,
    "rows": Rows,
    "whole": Whole,
}


def main(argv: Sequence[str]) -> int:
    """Forecast what a file defines; 1 if a budget was given and it does not fit."""
    given = _parser().parse(argv)
    file = read_plan_file(given.file)
    sizes = {name: getattr(given, name) for name in ("batch", "sequence")}
    found = forecast(
        file.model,
        file.inputs_of({name: size for name, size in sizes.items() if size is not None}),
        world=given.world,
        replicas=given.replicas,
        units=file.units,
        layout=LAYOUTS[given.layout](),
        policy=file.policy,
        reshard=given.reshard,
        prefetch_depth=given.prefetch,
        micro_batches=given.micro_batches,
        checkpointing=given.checkpointing,
        optimizer=file.optimizer,
        loss=file.loss,
        device=given.device,
        network_model=given.network,
        torch_version=given.torch,
    )
    if given.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        stream = safe_stdout()
        console = Console(file=stream, markup=False, emoji=False, soft_wrap=True)
        show(found, console)
    if given.budget is None:
        return 0
    return int(found.memory.reserved_peak_bytes + found.context_bytes > given.budget * 1e9)


def _parser() -> Parser:
    parser = Parser(
        prog="shoal plan",
        description="Forecast the memory and time of a training step on N ranks, without a GPU.\n"
        "FILE defines model() and inputs(), and may define units(model), loss(output),\n"
        "optimizer(parameters) and precision.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a Python file")
    parser.add_argument("--world", type=_count, default=8, metavar="N", help="number of ranks (8)")
    parser.add_argument(
        "--replicas",
        type=_count,
        default=1,
        metavar="N",
        help="ranks that hold the same shards (1)",
    )
    parser.add_argument("--device", default="h200", help=f"{', '.join(ACCELERATORS)} (h200)")
    parser.add_argument(
        "--network", default="nvlink+ib", help="free, nvlink, ib or nvlink+ib (nvlink+ib)"
    )
    parser.add_argument("--layout", choices=LAYOUTS, default="even", help="of shards (even)")
    parser.add_argument(
        "--reshard", type=_reshard, metavar="yes|no|N", help="after forward; to N ranks (yes)"
    )
    parser.add_argument(
        "--prefetch", type=_count, default=1, metavar="N", help="units gathered ahead (1)"
    )
    parser.add_argument(
        "--micro-batches", type=_count, default=1, metavar="N", help="per optimizer step (1)"
    )
    parser.add_argument(
        "--checkpointing", action="store_true", help="recompute the activations of each unit"
    )
    parser.add_argument("--batch", type=_count, metavar="N", help="for inputs(batch=...)")
    parser.add_argument("--sequence", type=_count, metavar="N", help="for inputs(sequence=...)")
    parser.add_argument("--torch", metavar="VERSION", help="the release that will run (this one)")
    parser.add_argument(
        "--budget", type=_gigabytes, metavar="GB", help="exit with 1 if it needs more"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, got {text!r}")
    return int(text)


def _reshard(text: str) -> bool | int:
    return text == "yes" if text in ("yes", "no") else _count(text)


def _gigabytes(text: str) -> float:
    try:
        return float(text.lower().removesuffix("gb"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected gigabytes, as 80GB, got {text!r}") from None


def show(found: Forecast, console: Console) -> None:
    """Print a forecast for people."""
    memory, time = found.memory, found.time
    console.print(
        f"{found.num_parameters / 1e9:.2f} B parameters on {found.world_size} × {found.device}, "
        f"network {found.network}"
    )
    console.print()
    table = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(2):
        table.add_column()
    table.add_column(justify="right")
    most = max(memory.by_category.values(), default=1)
    for name, size in sorted(memory.by_category.items(), key=lambda item: -item[1]):
        table.add_row(name, "█" * round(BAR * size / most), f"{size / GIB:.2f} GiB")
    console.print(table)
    console.print()
    needed = memory.reserved_peak_bytes + found.context_bytes
    verdict = "fits" if found.fits else "does NOT fit"
    console.print(
        f"memory    {memory.allocated_peak_bytes / GIB:.2f} GiB allocated, "
        f"{memory.reserved_peak_bytes / GIB:.2f} reserved, {needed / GIB:.2f} with CUDA: "
        f"{verdict} into {found.device_bytes / GIB:.1f}"
    )
    console.print(
        f"step      {time.step_ms:.1f} ms: kernels {time.compute_ms:.1f}, host {time.host_ms:.1f}, "
        f"link {time.link_ms:.1f} of which {time.exposed_ms:.1f} exposed"
    )
    for wait in time.waits[:3]:
        console.print(f"          compute waits {wait.duration_us / 1e3:.2f} ms at {wait.moment}")
    console.print()
    for assumption in found.assumptions:
        console.print(f"- {assumption}")
