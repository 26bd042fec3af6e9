"""`shoal explain`: run a script, then tell what the compiler made of it."""

from __future__ import annotations

import argparse
import functools
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console

from shoal.cli.flags import Parser
from shoal.compile.observe import records
from shoal.compile.observe.dynamo import breaks, recompiles
from shoal.compile.observe.summary import render
from shoal.errors import UsageError
from shoal.train import environment
from shoal.train.safe_stream import safe_stdout

WIDTH = 140
"""Of the table where no terminal has one."""


def make_parser() -> Parser:
    """Build the parser of `shoal explain`."""
    parser = Parser(
        prog="shoal explain",
        description="Run a script whose torch.compile uses shoal unless it names another backend,\n"
        "then print its graphs, why they broke or were compiled again, and what they save.",
    )
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="a Python file")
    parser.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="...", help="what the script is given"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the script named in `argv`, print the summary, and return the script's exit code."""
    given = make_parser().parse(argv)
    if not given.script.is_file():
        raise UsageError(f"there is no script {given.script}")
    try:
        return _run(given.script, given.args)
    finally:
        _print_summary()


def _run(script: Path, args: Sequence[str]) -> int:
    """Run a script as Python does; its exit code."""
    with _as_program(script, args), shoal_by_default():
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as stop:
            return _code_of(stop)
        except Exception as error:
            traceback.print_exception(
                type(error), error, _from_script(error.__traceback__, str(script))
            )
            return 1
    return 0


def _code_of(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return 1


def _from_script(trace: TracebackType | None, script: str) -> TracebackType | None:
    """The frames from the script on: who ran it is of no interest."""
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    return trace


@contextmanager
def _as_program(script: Path, args: Sequence[str]) -> Iterator[None]:
    """Let a script find its arguments and its neighbours."""
    before = sys.argv, sys.path[:]
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before


@contextmanager
def shoal_by_default() -> Iterator[None]:
    """Let `torch.compile` use shoal where a call names no backend, nor options of one."""
    original = torch.compile

    @functools.wraps(original)
    def compile_with_shoal(*args: Any, **kwargs: Any) -> Any:
        if "backend" not in kwargs and kwargs.get("options") is None:
            kwargs["backend"] = "shoal"
        return original(*args, **kwargs)

    torch.compile = compile_with_shoal  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = original


def _print_summary() -> None:
    place = environment.place()
    if place is not None and place.rank != 0:
        return
    stream = safe_stdout()
    width = None if stream.isatty() else WIDTH
    # Paths and reasons are no markup.
    console = Console(file=stream, width=width, soft_wrap=True, markup=False, emoji=False)
    console.print(render(records(), breaks(), recompiles()))
