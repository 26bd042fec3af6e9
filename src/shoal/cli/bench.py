"""`shoal bench`: measure shoal beside torch's own engines."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from shoal.bench.cases import CASES, Case, Mode, Run, device_type_of
from shoal.bench.engines import ENGINES
from shoal.bench.host import Host, describe_host
from shoal.bench.measure import measure
from shoal.bench.results import Results, Source, Status, describe_case, merge_files, write_results
from shoal.bench.table import describe_record, render
from shoal.cli.flags import Parser
from shoal.cli.suggest import did_you_mean
from shoal.errors import UsageError

RESULTS_DIR = Path("benchmarks/results")

_DESCRIPTION = """\
Time forward+backward and the optimizer, and measure memory, for each engine on each case.
Every run has processes of its own; the table gives ratios to plain and to fsdp2.

  shoal bench --cases B1,B4 --engines plain,fsdp2,shoal
  shoal bench --quick
  shoal bench --merge benchmarks/results/a.json benchmarks/results/b.json
"""

_WIDTH = 132
"""Of the table where there is no terminal to fit it to."""


def main(argv: Sequence[str]) -> int:
    """Measure or merge; 1 if a run failed."""
    options = make_parser().parse(argv)
    command = shlex.join(["shoal", "bench", *_without_out(argv)])
    # Names in files are no markup.
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(width=_WIDTH, markup=False, emoji=False)
    if options.merge is not None:
        return _merge(options, command, console)
    return _measure(options, command, console)


def _without_out(argv: Sequence[str]) -> list[str]:
    """Where the file goes says nothing about how it was measured, but much about a machine."""
    kept: list[str] = []
    skip = False
    for word in argv:
        if not skip and word != "--out" and not word.startswith("--out="):
            kept.append(word)
        skip = word == "--out"
    return kept


def make_parser() -> Parser:
    """Build the parser of `shoal bench`."""
    parser = Parser(prog="shoal bench", usage="shoal bench [flags]", description=_DESCRIPTION)
    families = ",".join(dict.fromkeys(case.family for case in CASES))
    modes = f"of {','.join(Mode)} (default: eager,compiled; with --quick: eager)"
    quick = "tiny models, few steps: shows on any machine that everything runs, measures nothing"
    fill = "let the modelled network write every gather while steps are timed, by kernels"
    timeout = "end a run after so long (default: 180; 600 where something is compiled)"
    add = parser.add_argument
    add("--cases", type=_names, metavar="LIST", help=f"default: {families}")
    add("--engines", type=_names, metavar="LIST", help=f"default: {','.join(ENGINES)}")
    add("--modes", type=_names, metavar="LIST", help=modes)
    add("--quick", action="store_true", help=quick)
    add("--repeats", type=_count, metavar="N", help="rounds of timed steps (default: per case)")
    add("--steps", type=_count, metavar="N", help="timed steps per round (default: per case)")
    add("--fill", action="store_true", help=fill)
    add("--timeout", type=_count, metavar="SECONDS", help=timeout)
    add("--merge", nargs="+", type=Path, metavar="FILE", help="measure nothing: join these results")
    add("--out", type=Path, metavar="FILE", help=f"default: a new file in {RESULTS_DIR}/")
    return parser


def _merge(options: argparse.Namespace, command: str, console: Console) -> int:
    for flag in ("cases", "engines", "modes", "quick", "repeats", "steps", "fill", "timeout"):
        if getattr(options, flag):
            raise UsageError(f"--merge measures nothing, so --{flag} has no place beside it")
    results = merge_files(options.merge, command)
    path = options.out or RESULTS_DIR / f"{_timestamp()}-merged.json"
    _write(results, path)
    console.print(render(results))
    console.print(f"written to {path}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _measure(options: argparse.Namespace, command: str, console: Console) -> int:
    cases = _choose_cases(options.cases)
    engines = _choose("engine", options.engines or ENGINES, ENGINES)
    modes = options.modes or [Mode.EAGER, *([] if options.quick else [Mode.COMPILED])]
    modes = _choose("mode", modes, list(Mode))
    host = describe_host()
    if options.quick:
        cases = [case.quickly() for case in cases]
    pace = {"rounds": options.repeats, "steps": options.steps}
    asked = {name: count for name, count in pace.items() if count is not None}
    cases = [replace(case, fill=options.fill, pace=replace(case.pace, **asked)) for case in cases]
    runs = [
        Run(
            case=case,
            engine=engine,
            mode=Mode(mode),
            device_type=device_type_of(case, cuda=host.gpu is not None),
        )
        for case in cases
        for mode in modes
        for engine in engines
    ]
    results = Results(
        quick=options.quick,
        sources=(_source(command, host, options),),
        cases={case.name: describe_case(case) for case in cases},
        records=(),
    )
    path = options.out or RESULTS_DIR / _file_name(host, quick=options.quick)
    results = _measure_into(path, results, runs, host, options.timeout, console)
    console.print(render(results))
    console.print(f"written to {path}", highlight=False, markup=False, soft_wrap=True)
    return int(any(record.status is Status.FAILED for record in results.records))


def _measure_into(
    path: Path,
    results: Results,
    runs: Sequence[Run],
    host: Host,
    timeout_s: float | None,
    console: Console,
) -> Results:
    """Measure, and keep what there is in the file after every run."""
    _write(results, path)  # before the first minute is spent, not after the last
    with console.status("starting") as status:
        records = measure(
            runs,
            host,
            timeout_s=timeout_s,
            on_stage=lambda run, stage: status.update(f"{run}: {stage}"),
        )
        for record in records:
            results = replace(results, records=(*results.records, record))
            _write(results, path)
            if record.status is not Status.UNSUPPORTED:
                console.print(describe_record(record), highlight=False, markup=False)
    return results


def _source(command: str, host: Host, options: argparse.Namespace) -> Source:
    names = ("quick", "repeats", "steps", "fill", "timeout")
    settings = {name: getattr(options, name) for name in names}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return Source(command=command, created=created, host=host, settings=settings)


def _write(results: Results, path: Path) -> None:
    try:
        write_results(results, path)
    except OSError as error:
        raise UsageError(
            f"cannot write results to {path}: {error.strerror}; name another file with --out"
        ) from None


def _timestamp() -> str:
    return datetime.now(UTC).strftime("%Y%m%d-%H%M%S")


def _file_name(host: Host, *, quick: bool) -> str:
    device = re.sub(r"[^a-z0-9]+", "-", (host.gpu or host.cpu).lower()).strip("-")
    return f"{_timestamp()}-{device}{'-quick' if quick else ''}.json"


def _choose_cases(names: Sequence[str] | None) -> list[Case]:
    """The cases of these names or families; all if there are none."""
    offered = [*dict.fromkeys(case.family for case in CASES), *(case.name for case in CASES)]
    asked = _choose("case", names or offered, list(dict.fromkeys(offered)))
    return [case for case in CASES if case.name in asked or case.family in asked]


def _choose(kind: str, names: Iterable[str], offered: Iterable[str]) -> list[str]:
    """The offered spellings of `names`, in the order offered; refuses any that is not there."""
    spelling = {name.casefold(): name for name in offered}
    asked: set[str] = set()
    for name in names:
        if name.casefold() not in spelling:
            hint = did_you_mean(name, spelling.values())
            raise UsageError(
                f"unknown {kind} {name}.{hint} There are {', '.join(spelling.values())}."
            )
        asked.add(spelling[name.casefold()])
    return [name for name in spelling.values() if name in asked]


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"expected names with commas between them, got {text!r}")
    return names


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)
