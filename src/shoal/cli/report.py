"""`shoal report`: draw the report of a finished or interrupted run again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.cli.flags import Parser
from shoal.report import write_report
from shoal.train.safe_stream import printable


def make_parser() -> Parser:
    """Build the parser of `shoal report`."""
    parser = Parser(
        prog="shoal report",
        description="Write report.html into a run folder; it opens in a browser, offline.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="such as runs/demo")
    return parser


def main(argv: Sequence[str]) -> int:
    """Write the report of the run folder named in `argv`, and print where it is."""
    print(printable(str(write_report(make_parser().parse(argv).run_dir))))
    return 0
