"""Results as tables: for a terminal, and in documents.

Tables in documents are written from the stored results, so that the two cannot differ. A document
says where a table stands, and of what:

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
from itertools import groupby
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.bench.cases import CASES, Mode
from shoal.bench.engines import ENGINES
from shoal.bench.figures import Collectives, Figures, Gathers, Memory
from shoal.bench.results import Record, Results, Status, merge_files
from shoal.errors import UsageError

REFERENCES = ("plain", "fsdp2")
"""The engines that the others are divided by."""

NOTHING = "–"
ELSEWHERE = "†"
UPPER_BOUND = "‡"


def render(results: Results) -> RenderableType:
    """The table, and under it what it cannot say."""
    table = Table(title="shoal bench, quick: not a measurement" if results.quick else "shoal bench")
    for name in ("case", "engine", "mode"):
        table.add_column(name, no_wrap=True)
    for name in ("fwd+bwd ms", *(f"× {name}" for name in REFERENCES), "host ms", "optimizer ms"):
        table.add_column(name, justify="right")
    table.add_column("memory GiB", justify="right", no_wrap=True)
    table.add_column("collectives", justify="right", no_wrap=True)
    for case, records in _by_case(results):
        shown = _letters(case)
        for row in _rows(results, records):
            table.add_row(shown, *row)
            shown = ""
        table.add_section()
    return Group(table, *(Text(_letters(line)) for line in _notes(results)))


def describe_record(record: Record) -> str:
    """One line for a run that has just ended."""
    run = f"{record.case:<8} {record.engine:<6} {record.mode:<10}"
    if record.figures is None:
        return f"{run} {record.status}: {(record.reason or '').splitlines()[-1]}"
    return f"{run} {record.figures.forward_backward_ms:10.2f} ms"


def _by_case(results: Results) -> Iterator[tuple[str, list[Record]]]:
    order = {case.name: index for index, case in enumerate(CASES)}
    engines = list(dict.fromkeys(record.engine for record in results.records))
    modes = list(Mode)

    def place(record: Record) -> tuple[int, str, int, int]:
        return (
            order.get(record.case, len(order)),
            record.case,
            modes.index(record.mode),
            engines.index(record.engine),
        )

    for case, records in groupby(sorted(results.records, key=place), key=lambda one: one.case):
        yield case, list(records)


def _rows(results: Results, records: list[Record]) -> Iterator[tuple[str | Text, ...]]:
    for mode, group in groupby(records, key=lambda record: record.mode):
        of_mode = list(group)
        if all(record.status is Status.UNSUPPORTED for record in of_mode):
            # One line is enough for what no engine can do here.
            yield (NOTHING, mode, *[NOTHING] * 7)
            continue
        for record in of_mode:
            yield (_letters(record.engine), mode, *_cells(results, record))


def _letters(text: str) -> str:
    """A text of a file, which may be anybody's, without signs that a terminal would obey."""
    return "".join(sign for sign in text if sign.isprintable() or sign == "\n")


def _cells(results: Results, record: Record) -> Iterator[str | Text]:
    figures = record.figures
    if figures is None:
        failed = record.status is Status.FAILED
        yield Text("failed", style="bold red") if failed else NOTHING
        yield from [NOTHING] * 6
        return
    yield milliseconds(figures)
    for reference in REFERENCES:
        yield ratio(results, record, reference)
    yield f"{figures.host_ms:.1f}" if figures.host_ms is not None else NOTHING
    yield f"{figures.optimizer_ms:.2f}"
    yield gibibytes(figures.memory)
    yield _collectives(figures.collectives)


def milliseconds(figures: Figures) -> str:
    """The time of forward+backward, with a mark if kernels of the network are in it."""
    is_on_gpu = figures.memory.allocated_gib is not None
    mark = UPPER_BOUND if is_on_gpu and figures.gathers is Gathers.WRITTEN else ""
    return f"{figures.forward_backward_ms:.1f}{mark}"


def ratio(results: Results, record: Record, reference: str) -> str:
    """How much longer than the reference, in the same case and mode."""
    other = results.find(record.case, reference, record.mode)
    if record.figures is None or other is None or other.figures is None:
        return NOTHING
    value = record.figures.forward_backward_ms / other.figures.forward_backward_ms
    return f"{value:.2f}{ELSEWHERE if other.source != record.source else ''}"


def gibibytes(memory: Memory) -> str:
    """Peak memory: allocated and reserved on CUDA, resident on CPU."""
    if memory.allocated_gib is not None and memory.reserved_gib is not None:
        return f"{memory.allocated_gib:.2f} / {memory.reserved_gib:.2f}"
    return f"{memory.resident_gib:.2f}" if memory.resident_gib is not None else NOTHING


def _collectives(collectives: Collectives | None) -> str:
    if collectives is None:
        return NOTHING
    return f"{collectives.num_calls} · {collectives.num_bytes / 1e6:,.1f} MB"


def _notes(results: Results) -> Iterator[str]:
    for case, records in _by_case(results):
        yield f"{case}: {results.cases[case]['title']}; {records[0].device}"
    if any(
        ELSEWHERE in ratio(results, record, reference)
        for record in results.records
        for reference in REFERENCES
    ):
        yield f"{ELSEWHERE} the reference was measured by another call of the command"
    if any(r.figures and UPPER_BOUND in milliseconds(r.figures) for r in results.records):
        yield f"{UPPER_BOUND} an upper bound: the network wrote gathers by kernels in timed steps"
    reasons: dict[tuple[Status, str], list[str]] = {}
    for record in results.records:
        if record.reason is not None:
            runs = reasons.setdefault((record.status, record.reason), [])
            runs.append(f"{record.case} {record.engine} {record.mode}")
    for (status, reason), runs in reasons.items():
        shown = runs[0] if len(runs) == 1 else f"{runs[0]} … {runs[-1]} ({len(runs)} runs)"
        yield f"{NOTHING if status is Status.UNSUPPORTED else 'failed'} {shown}: {reason}"


# Tables in documents.


_TABLE = re.compile(r"(<!-- shoal bench: (\w+) ([\w,]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_NOT_MEASURED = "Not measured yet.\n"

Cell = Callable[[Results, Record, Figures], str]


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
            body = _page_table(results, _CELLS[kind], [Mode(mode) for mode in modes.split(",")])
        return f"{begin}\n{body}\n{end}"

    return _TABLE.sub(table, text)


def _page_table(results: Results, cell: Cell, modes: Sequence[Mode]) -> str:
    shown = [(mode, engine) for mode in modes for engine in ENGINES]
    reached = [r for r in results.records if r.figures and (r.mode, r.engine) in shown]
    reached.sort(key=lambda record: shown.index((record.mode, record.engine)))
    cases = [case.name for case in CASES if case.name in {record.case for record in reached}]
    if not reached:
        return _NOT_MEASURED
    lines = [["", *cases], ["---"] * (len(cases) + 1)]
    for (mode, engine), records in groupby(reached, key=lambda r: (r.mode, r.engine)):
        by_case = {record.case: record for record in records}
        name = engine if len(modes) == 1 else f"{engine}, {mode}"
        found = (by_case.get(case) for case in cases)
        cells = (cell(results, r, r.figures) if r and r.figures else NOTHING for r in found)
        lines.append([name, *cells])
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{table}\n{' '.join(_page_notes(results, reached, table))}\n"


def _page_notes(results: Results, records: Sequence[Record], table: str) -> Iterator[str]:
    devices: dict[tuple[str, str], dict[str, None]] = {}
    for record in records:
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


def _ratio_cell(results: Results, record: Record, figures: Figures) -> str:
    mark = UPPER_BOUND if UPPER_BOUND in milliseconds(figures) else ""
    return ratio(results, record, REFERENCES[0]) + mark


_CELLS: dict[str, Cell] = {
    "ratios": _ratio_cell,
    "milliseconds": lambda results, record, figures: milliseconds(figures),
    "memory": lambda results, record, figures: gibibytes(figures.memory),
}
