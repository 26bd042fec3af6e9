"""`shoal plan`: what a run will need, before it runs."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from shoal.cli.flags import Parser
from shoal.comm.network import Network
from shoal.compile.environment import cache_folder
from shoal.errors import UsageError
from shoal.layout import Even, Flat, Layout, Rows, Whole
from shoal.plan import Choice, Forecast, Search, Setup, Workload, forecast_setup
from shoal.plan.accelerators import ACCELERATORS, accelerator
from shoal.plan.hugging_face import hugging_face_workload
from shoal.plan.measured_network import measure_network, read_network, store_network
from shoal.plan.plan_file import read_plan_file
from shoal.plan.profile import profile_for
from shoal.plan.search import Sizes
from shoal.report.plan_page import write_plan_page, write_trace
from shoal.runtime.policy import MixedPrecisionPolicy
from shoal.train import environment
from shoal.train.config import load_recipe
from shoal.train.foresight import is_recipe, setup_of, workload_of
from shoal.train.options import replace_options
from shoal.train.safe_stream import safe_stdout, say
from shoal.train.world import join_world

GIB = 1 << 30
BAR = 24
PROFILE = "plan-profile.json"
"""The file in the user's cache folder."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS: Mapping[str, type[Layout]] = {
    "even": Even,
    "flat": Flat,
    "rows": Rows,
    "whole": Whole,
}


def main(argv: Sequence[str]) -> int:
    """Forecast what a file defines; 1 if a budget was given and it does not fit."""
    with naming_gaps():
        return _plan(make_parser().parse(argv))


@contextmanager
def naming_gaps() -> Iterator[None]:
    """What is not modelled is wrong input on a command line: one message, and no traceback."""
    try:
        yield
    except NotImplementedError as error:
        raise UsageError(str(error)) from error


def _plan(given: argparse.Namespace) -> int:
    if given.measure_network:
        return _measure_network(given.device)
    source = Planned.of(given)
    if given.fit is not None:
        return _choose(source, given)
    if given.find != "fastest" or given.global_batch is not None:
        raise UsageError("--find and --global-batch are for a search: say what it is to --fit into")
    options = _options(given)
    found = forecast_setup(
        source.workload,
        source.setup,
        draws=_draws(given),
        **options,
    )
    if options["profile"] is not None:
        options["profile"].store()
    _write(given, found)
    if given.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        show(found, _console(), given.budget)
    if given.budget is None:
        return 0
    return int(found.needed_bytes > given.budget)


def _measure_network(device: str) -> int:
    """Time the ranks that torchrun started; rank 0 tells, and keeps it."""
    place = environment.place()
    if place is None:
        raise UsageError(
            "--measure-network times the ranks of a job, and this is none: run torchrun "
            "--nproc-per-node N -m shoal plan --measure-network"
        )
    is_cpu = accelerator(device).is_cpu or not torch.cuda.is_available()
    with join_world(place, "cpu" if is_cpu else "cuda", replicas=1) as world:
        found = measure_network(world.device)
        if place.rank == 0:
            store_network(network_file(), found)
            say(
                f"{found.name}: {found.bandwidth_gb_per_s:.3g} GB/s, {found.latency_us:.0f} µs; "
                "--network measured asks for it",
                stream=sys.stdout,
            )
    return 0


def network_file() -> Path:
    """Where a network that was measured is kept."""
    return cache_folder().parent / "plan-network.json"


def _network(name: str) -> str | Network:
    return read_network(network_file()) if name == "measured" else name


def _options(given: argparse.Namespace) -> dict[str, Any]:
    """Of a forecast, whatever the setup."""
    profile = None
    if given.measure:
        profile = profile_for(given.device, given.profile or cache_folder().parent / PROFILE)
    return {
        "device": given.device,
        "network": given.network,
        "torch_version": given.torch,
        "profile": profile,
    }


def _console() -> Console:
    return Console(file=safe_stdout(), markup=False, emoji=False, soft_wrap=True)


def _draws(given: argparse.Namespace) -> bool:
    return given.html is not None or given.trace is not None


def _write(given: argparse.Namespace, found: Forecast, choice: Choice | None = None) -> None:
    """Write the page and the trace, where files were named."""
    if given.html is not None:
        write_plan_page(given.html, found, choice)
        say(f"written to {given.html}", stream=sys.stderr)
    if given.trace is not None:
        write_trace(given.trace, found)
        say(f"written to {given.trace}", stream=sys.stderr)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What is to be planned, from whatever the command line names."""

    workload: Workload
    setup: Setup
    of_sizes: Callable[[Sizes], Workload]
    """The workload with inputs of other sizes."""
    sizes: Sizes
    is_recipe: bool = False

    @classmethod
    def of(cls, given: argparse.Namespace) -> Planned:
        """A Python file, a recipe, or a model of Hugging Face's."""
        named = {name: getattr(given, name) for name in ("batch", "sequence")}
        sizes = {name: size for name, size in named.items() if size is not None}
        if given.model is not None:
            if given.file is not None:
                raise UsageError(f"plan {given.file}, or --model {given.model}, not both")
            kind, colon, path = given.model.partition(":")
            if kind != "hf" or not colon:
                raise UsageError(f"--model: expected hf:PATH, got {given.model!r}")
            half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            return cls(
                workload=hugging_face_workload(Path(path), sizes),
                setup=_setup(given, half),
                of_sizes=lambda one: hugging_face_workload(Path(path), one),
                sizes=sizes,
            )
        if given.file is None:
            raise UsageError("what is to be planned? Name a FILE, or --model hf:PATH")
        if is_recipe(given.file):
            return cls._of_recipe(given, sizes)
        file = read_plan_file(Path(given.file))
        return cls(
            workload=file.workload(sizes),
            setup=_setup(given, file.policy),
            of_sizes=file.workload,
            sizes=sizes,
        )

    @classmethod
    def _of_recipe(cls, given: argparse.Namespace, sizes: Mapping[str, int]) -> Planned:
        _refuse_what_recipes_say(given)
        config = load_recipe(given.file)
        if "batch" in sizes:
            config = replace_options(config, {("run", "batch_size"): sizes["batch"] * given.world})
        if "sequence" in sizes:
            config = replace_options(config, {("model", "context"): sizes["sequence"]})
        planned = setup_of(config, world=given.world, device=given.device)
        workload = workload_of(config, world=given.world)
        return cls(
            workload=workload,
            of_sizes=lambda _: workload,
            sizes={},
            is_recipe=True,
            setup=replace(_setup(given, planned.policy), **_chosen_by(planned)),
        )


def _refuse_what_recipes_say(given: argparse.Namespace) -> None:
    usual = {"replicas": 1, "micro_batches": 1, "reduce_each": False, "checkpointing": False}
    for name, value in usual.items():
        if getattr(given, name) != value:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag}: the recipe {given.file} says that; change it there")


def _choose(source: Planned, given: argparse.Namespace) -> int:
    """Search for a plan that fits, and print it with the code that makes it."""
    if source.is_recipe:
        raise NotImplementedError(
            "shoal plan --fit: plans of a recipe cannot be searched, only forecast; put its model "
            "into a file with model() and inputs()"
        )
    if given.budget is not None:
        raise UsageError("--fit is the budget of a search; --budget goes with a single forecast")
    sought = given.find.partition("-")[2]
    if sought in source.sizes:
        raise UsageError(f"--find {given.find} looks for --{sought}: leave that out")
    console, options = _console(), _options(given)
    shows = not given.json and sys.stderr.isatty()
    search = Search(
        workload=source.of_sizes,
        base=source.setup,
        budget_bytes=given.fit,
        global_batch=given.global_batch,
        options=options,
        draws=_draws(given),
        progress=_say_progress if shows else lambda count, plan: None,
    )
    sizes = _sizes_to_try(source, given)
    if given.find == "fastest":
        found = search.fastest(sizes)
    elif given.find == "fewest-gpus":
        found = search.fewest(sizes)
    elif given.find == "cheapest":
        found = search.cheapest(sizes)
    else:
        found = search.largest(sought, source.sizes)
    if shows:
        print("\r\033[K", end="", file=sys.stderr)
    if options["profile"] is not None:
        options["profile"].store()
    _write(given, found.forecast, found)
    if given.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        show_choice(found, console)
    return 0


def _say_progress(count: int, plan: str) -> None:
    print(f"\r\033[K{count} plans: {plan[:70]}", end="", file=sys.stderr, flush=True)


def _sizes_to_try(source: Planned, given: argparse.Namespace) -> list[Sizes]:
    """One, or with a global batch all micro-batches of a power of two."""
    if given.global_batch is None or "batch" in source.sizes:
        return [source.sizes]
    return [{**source.sizes, "batch": 1 << power} for power in range(4)]


def _chosen_by(recipe: Setup) -> dict[str, Any]:
    """What a recipe decides, whatever the flags say."""
    return {name: getattr(recipe, name) for name in ("replicas", "micro_batches", "reduces_each")}


def _setup(given: argparse.Namespace, policy: MixedPrecisionPolicy | None) -> Setup:
    policy = policy or MixedPrecisionPolicy()
    if given.gradients is not None:
        policy = replace(policy, reduce_dtype=DTYPES[given.gradients])
    return Setup(
        world=given.world,
        replicas=given.replicas,
        layout=LAYOUTS[given.layout](),
        policy=policy,
        reshard=given.reshard,
        prefetch_depth=given.prefetch,
        micro_batches=given.micro_batches,
        reduces_each=given.reduce_each,
        checkpointing=given.checkpointing,
    )


def make_parser() -> Parser:
    """Build the parser of `shoal plan`."""
    parser = Parser(
        prog="shoal plan",
        description="Forecast the memory and time of a training step on N ranks, without a GPU.\n"
        "FILE defines model() and inputs(), and may define units(model), loss(output),\n"
        "optimizer(parameters) and precision; or it is a recipe of `shoal train`.",
    )
    add_planning_flags(parser)
    parser.add_argument("--device", default="h200", help=f"{', '.join(ACCELERATORS)} (h200)")
    parser.add_argument("--torch", metavar="VERSION", help="the release that will run (this one)")
    parser.add_argument("--budget", type=_bytes, metavar="GB", help="exit with 1 if it needs more")
    search = parser.add_argument_group("searching for a plan")
    search.add_argument("--fit", type=_bytes, metavar="GB", help="choose a plan that needs no more")
    search.add_argument(
        "--find",
        choices=("fastest", "largest-batch", "longest-sequence", "fewest-gpus", "cheapest"),
        default="fastest",
        help="what to choose (fastest)",
    )
    search.add_argument(
        "--global-batch", type=_tokens, metavar="N", help="tokens of a whole step, as 4M"
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="run each distinct operator once on the device here, for the time",
    )
    parser.add_argument(
        "--profile", type=Path, metavar="PATH", help="where --measure keeps what it measured"
    )
    parser.add_argument(
        "--measure-network",
        action="store_true",
        help="under torchrun: time gathers between its ranks, for --network measured",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", type=Path, metavar="PATH", help="write a page of charts")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="PATH",
        help="write the step for Perfetto and chrome://tracing",
    )
    return parser


def add_planning_flags(parser: Parser) -> None:
    """What is planned, on how many ranks, with which settings."""
    parser.add_argument("file", nargs="?", metavar="FILE", help="a Python file, FILE:NAME a recipe")
    parser.add_argument("--model", metavar="hf:PATH", help="a config.json of transformers instead")
    parser.add_argument("--world", type=_count, default=8, metavar="N", help="number of ranks (8)")
    parser.add_argument(
        "--network",
        type=_network,
        default="nvlink+ib",
        help="free, nvlink, ib, nvlink+ib or measured (nvlink+ib)",
    )
    parser.add_argument("--batch", type=_count, metavar="N", help="for inputs(batch=...)")
    parser.add_argument("--sequence", type=_count, metavar="N", help="for inputs(sequence=...)")
    _add_setup(parser)


def _add_setup(parser: Parser) -> None:
    group = parser.add_argument_group("how the model is sharded and stepped")
    group.add_argument(
        "--replicas",
        type=_count,
        default=1,
        metavar="N",
        help="how many groups of ranks hold all shards each (1)",
    )
    group.add_argument("--layout", choices=LAYOUTS, default="even", help="of shards (even)")
    group.add_argument(
        "--reshard", type=_reshard, metavar="yes|no|N", help="after forward; to N ranks (yes)"
    )
    group.add_argument(
        "--prefetch", type=_count_or_none, default=1, metavar="N", help="units gathered ahead (1)"
    )
    group.add_argument(
        "--micro-batches", type=_count, default=1, metavar="N", help="per optimizer step (1)"
    )
    group.add_argument(
        "--reduce-each", action="store_true", help="reduce every micro-batch, not their sum"
    )
    group.add_argument(
        "--checkpointing",
        type=_count,
        nargs="?",
        const=True,
        default=False,
        metavar="N",
        help="recompute the activations of each unit, or of every N-th",
    )
    group.add_argument("--gradients", choices=DTYPES, help="dtype in which they are reduced")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, got {text!r}")
    return int(text)


def _tokens(text: str) -> int:
    factor = {"k": 1 << 10, "m": 1 << 20}.get(text[-1:].lower(), 1)
    return _count(text[:-1] if factor > 1 else text) * factor


def _count_or_none(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _reshard(text: str) -> bool | int:
    return text == "yes" if text in ("yes", "no") else _count(text)


_BYTES = {"": 1e9, "mb": 1e6, "gb": 1e9, "tb": 1e12, "mib": 1 << 20, "gib": GIB, "tib": 1 << 40}


def _bytes(text: str) -> float:
    """Bytes, from a number and a unit; a number alone is one of gigabytes."""
    number = text.lower().rstrip("bgikmt")
    try:
        found = float(number) * _BYTES[text.lower()[len(number) :]]
    except (KeyError, ValueError):
        found = 0.0
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"expected a size, as 80GB, 80GiB or 1TB, got {text!r}")
    return found


NUM_SHOWN = 12


def show_choice(found: Choice, console: Console) -> None:
    """Print what a search chose, what else fits, and why the rest does not."""
    show(found.forecast, console, found.budget_bytes)
    console.print()
    console.print(f"chosen: {found.chosen}, {found.chosen.tokens_per_s:,.0f} tokens/s")
    console.print()
    console.print(found.code)
    fitting = [one for one in found.judged if one.fits]
    others = [one for one in fitting if one is not found.chosen]
    others = sorted(others, key=lambda one: -one.tokens_per_s)[:NUM_SHOWN]
    if others:
        console.print()
        console.print(
            f"{len(fitting)} plans may fit; after the chosen one, the fastest need at least"
        )
    for one in others:
        assert one.figures is not None
        console.print(
            f"  {one.tokens_per_s:12,.0f} tokens/s  {one.figures.least_bytes / 1e9:6.1f} GB  {one}"
        )
    rejected = [one for one in found.judged if not one.fits]
    if rejected:
        console.print()
        console.print(f"{len(rejected)} plans do not fit")
    for one in rejected:
        console.print(f"  {one}: {one.why_not}")


def show(found: Forecast, console: Console, budget_bytes: float | None = None) -> None:
    """Print a forecast for people; without a budget the device's memory is."""
    budget = found.device_bytes if budget_bytes is None else budget_bytes
    memory, time = found.memory, found.time
    console.print(
        f"{found.num_parameters / 1e9:.2f} B parameters on {found.world_size} × {found.device}, "
        f"network {found.network}"
    )
    console.print(found.plan)
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
    needed = f"{found.needed_bytes / GIB:.2f}"
    over = found.needed_bytes - budget
    verdict = "fits into" if over <= 0 else f"{over / GIB:.2f} GiB too much for"
    console.print(
        f"memory    {memory.allocated_peak_bytes / GIB:.2f} GiB allocated, "
        f"{memory.reserved_peak_bytes / GIB:.2f} reserved, {needed} with CUDA: "
        f"{verdict} {budget / GIB:.1f}"
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
