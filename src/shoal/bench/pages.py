"""Figures in documents, written from the stored results, so that the two cannot differ.

A document says where a table stands, and of what:

    <!-- shoal bench: ratios eager -->
    ...
    <!-- end -->

Kinds are `ratios` (to `plain`), `milliseconds` and `memory`; the second word is a mode, or several
with commas between them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from shoal.bench.cases import CASES
from shoal.bench.engines import ENGINES
from shoal.bench.merge import merge_files
from shoal.bench.results import Record, Results, Status
from shoal.bench.run import Mode
from shoal.bench.table import (
    ELSEWHERE,
    NOTHING,
    REFERENCES,
    UPPER_BOUND,
    gibibytes,
    milliseconds,
    ratio,
)
from shoal.errors import UsageError

_TABLE = re.compile(r"(<!-- shoal bench: (\w+) ([\w,]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_NOT_MEASURED = "Not measured yet.\n"

Cell = Callable[[Results, Record], str]


def stored_results(folder: Path) -> Results | None:
    """All results of `shoal bench` in a folder as one; None if there are none."""
    paths = [path for path in sorted(folder.glob("*.json")) if _is_of_bench(path)]
    return merge_files(paths, "stored results") if paths else None


def _is_of_bench(path: Path) -> bool:
    document = json.loads(path.read_text())
    return isinstance(document, dict) and {"schema", "records"} <= document.keys()


def write_tables(text: str, results: Results | None) -> str:
    """A document with each of its tables made anew."""

    def table(found: re.Match[str]) -> str:
        begin, kind, modes, end = found.groups()
        if kind not in _CELLS:
            raise UsageError(f"no table of {kind}: there are {', '.join(_CELLS)}")
        body = _NOT_MEASURED
        if results is not None:
            body = _table(results, _CELLS[kind], [Mode(mode) for mode in modes.split(",")])
        return f"{begin}\n{body}\n{end}"

    return _TABLE.sub(table, text)


def _table(results: Results, cell: Cell, modes: Sequence[Mode]) -> str:
    rows = [_Row(results, engine, mode) for mode in modes for engine in ENGINES]
    rows = [row for row in rows if row.records]
    measured = {case for row in rows for case in row.records}
    cases = [case.name for case in CASES if case.name in measured]
    if not rows:
        return _NOT_MEASURED
    lines = [["", *cases], ["---"] * (len(cases) + 1)]
    for row in rows:
        name = row.engine if len(modes) == 1 else f"{row.engine}, {row.mode}"
        cells = [cell(results, row.records[c]) if c in row.records else NOTHING for c in cases]
        lines.append([name, *cells])
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{table}\n{' '.join(_notes(results, rows, table))}\n"


class _Row:
    """What one engine reached in one mode, by case."""

    def __init__(self, results: Results, engine: str, mode: Mode) -> None:
        self.engine, self.mode = engine, mode
        self.records = {
            record.case: record
            for record in results.records
            if (record.engine, record.mode, record.status) == (engine, mode, Status.OK)
        }


def _notes(results: Results, rows: Sequence[_Row], table: str) -> Iterator[str]:
    devices: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        for record in row.records.values():
            source = results.sources[record.source]
            files = devices.setdefault((record.device, source.host.torch), {})
            files[source.file or ""] = None
    for (device, torch), files in devices.items():
        named = ", ".join(f"`{file}`" for file in files)
        yield f"{device}, torch {torch.partition('+')[0]}: {named}."
    if ELSEWHERE in table:
        yield f"{ELSEWHERE}: {REFERENCES[0]} was measured by another call of the command."
    if UPPER_BOUND in table:
        yield f"{UPPER_BOUND}: an upper bound, with kernels that stand for the network."


def _ratio(results: Results, record: Record) -> str:
    assert record.figures is not None
    mark = UPPER_BOUND if UPPER_BOUND in milliseconds(record.figures) else ""
    return ratio(results, record, REFERENCES[0]) + mark


def _milliseconds(results: Results, record: Record) -> str:
    assert record.figures is not None
    return milliseconds(record.figures)


def _memory(results: Results, record: Record) -> str:
    assert record.figures is not None
    return gibibytes(record.figures.memory)


_CELLS: dict[str, Cell] = {
    "ratios": _ratio,
    "milliseconds": _milliseconds,
    "memory": _memory,
}
