"""What the scripts of `benchmarks/` share: flags, turns, an engine here, gloo ranks, the file.

parser = flags(__doc__, rounds=5)
options = parser.parse_args()
with built(run_of("B1-8", "shoal")) as worker:
    ...
store(options.out, figures=figures)
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import multiprocessing

from shoal.bench.cases import CASES, Mode, Run, device_type_of
from shoal.bench.engines import ENGINES
from shoal.bench.host import describe_host
from shoal.bench.worker import Stage, Worker
from shoal.errors import UsageError
from shoal.train import environment


def flags(
    doc: str | None, *, rounds: int | None = None, quick: str | None = None
) -> ArgumentParser:
    """A parser with `--rounds` and `--out`, and `--quick` where something can be made small.

    `doc` is the script's docstring, `rounds` the default, `quick` what that flag measures.
    """
    parser = ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=rounds)
    if quick is not None:
        parser.add_argument("--quick", action="store_true", help=f"{quick}: measures nothing")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    return parser


def store(out: Path | None, **content: object) -> None:
    """Write what was measured, by which command, when and where; without `out` write nothing."""
    if out is None:
        return
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": asdict(describe_host()),
        **content,
    }
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


T = TypeVar("T")


def turns(items: Iterable[T], rounds: int) -> Iterator[tuple[int, T]]:
    """All turns: the number of the round, and an item. Every second round has them in reverse."""
    order = list(items)
    for number in range(rounds):
        for item in order[:: 1 if number % 2 == 0 else -1]:
            yield number, item


def run_of(case_name: str, engine: str, mode: str = Mode.EAGER, *, quick: bool = False) -> Run:
    """A run on the device that is here, by its names."""
    named = {case.name: case for case in CASES}
    if case_name not in named:
        raise UsageError(f"unknown case {case_name}. There are {', '.join(named)}.")
    case = named[case_name].quickly() if quick else named[case_name]
    device_type = device_type_of(case, cuda=torch.cuda.is_available())
    return Run(case=case, engine=engine, mode=Mode(mode), device_type=device_type)


def on_ranks(num_ranks: int, measure: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns on rank 0 of so many gloo ranks, each of one thread."""
    with tempfile.TemporaryDirectory() as folder:
        given = (num_ranks, folder, measure, arguments)
        multiprocessing.spawn(_rank, given, nprocs=num_ranks)
        return json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))


def _rank(
    rank: int, size: int, folder: str, measure: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    environment.stay_on_loopback()
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    found = measure(*arguments)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()  # no rank leaves while others still talk to it
    dist.destroy_process_group()


@contextmanager
def built(run: Run) -> Iterator[Worker]:
    """An engine in this process, as rank 0, warmed up; after it there is no process group."""
    if run.case.network is None and ENGINES[run.engine].uses_group:
        raise UsageError(f"{run} needs real ranks, and this is one process: choose of B1 to B5")
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker(run, 0, Path(folder))
        try:
            worker.answer(Stage.BUILD)
            yield worker
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
