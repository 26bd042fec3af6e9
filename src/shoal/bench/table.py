"""Results as tables: for a terminal, and in documents.

Tables in documents are written from the stored results, so that the two cannot differ. A document
says where a table stands, and of what:

    <!-- shoal bench: ratios eager -->
    ...
    <!-- end -->

Kinds are `ratios` (to `plain`), `milliseconds`, `memory` and `floors` (what they are made of); the
second word is a mode, or several with commas between them.
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
from shoal.bench.floor import Floor
from shoal.bench.ratios import ratio_of
from shoal.bench.results import Record, Results, Status, merge_files
from shoal.errors import UsageError

REFERENCES = ("plain", "fsdp2")
"""The engines that the others are divided by."""

NOTHING = "–"
ELSEWHERE = "†"
UPPER_BOUND = "‡"
TOO_GOOD = "§"
FLOOR = "floor"
"""The row of the limit for sharded engines."""


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
        floor = results.floor(of_mode[0].case, mode)
        if isinstance(floor, Floor):
            least = _collectives(floor)
            ratio_to_plain = f"{floor.ratio:.2f}"
            yield (FLOOR, mode, f"{floor.ms:.1f}", ratio_to_plain, *[NOTHING] * 4, least)


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
    mark = _too_good(results, record)
    yield milliseconds(figures) + mark
    for reference in REFERENCES:
        yield ratio(results, record, reference) + (mark if reference == REFERENCES[0] else "")
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
    """How much longer than the reference: the median within rounds, and the quietest beside it."""
    found = ratio_of(results, record, reference)
    if found is None:
        return NOTHING
    if record.engine == reference:
        return "1.00"
    if found.median is None:
        return f"{found.quietest:.2f}{ELSEWHERE}"
    return f"{found.median:.2f} ({found.quietest:.2f})"


def _too_good(results: Results, record: Record) -> str:
    """A mark at a sharded engine that is better than its floor, in time or as a ratio."""
    engine, plain = ENGINES.get(record.engine), REFERENCES[0]
    floor, found = results.floor(record.case, record.mode), ratio_of(results, record, plain)
    if engine is None or not engine.shards or found is None or not isinstance(floor, Floor):
        return ""
    ratios = [found.quietest] if found.median is None else [found.quietest, found.median]
    return TOO_GOOD if min(ratios) < floor.ratio else ""


def gibibytes(memory: Memory) -> str:
    """Peak memory: allocated and reserved on CUDA, resident on CPU."""
    if memory.allocated_gib is not None and memory.reserved_gib is not None:
        return f"{memory.allocated_gib:.2f} / {memory.reserved_gib:.2f}"
    return f"{memory.resident_gib:.2f}" if memory.resident_gib is not None else NOTHING


def _collectives(collectives: Collectives | Floor | None) -> str:
    if collectives is None:
        return NOTHING
    number = (
        collectives.num_collectives if isinstance(collectives, Floor) else collectives.num_calls
    )
    return f"{number} · {collectives.num_bytes / 1e6:,.1f} MB"


def _notes(results: Results) -> Iterator[str]:
    for case, records in _by_case(results):
        yield f"{case}: {results.cases[case]['title']}; {records[0].device}"
    if any(
        ELSEWHERE in ratio(results, record, reference)
        for record in results.records
        for reference in REFERENCES
    ):
        yield f"{ELSEWHERE} {_NOT_WITHIN_ROUNDS}"
    yield from _floor_notes(results)
    if any(r.figures and UPPER_BOUND in milliseconds(r.figures) for r in results.records):
        yield f"{UPPER_BOUND} an upper bound: the network wrote gathers by kernels in timed steps"
    if any(_too_good(results, record) for record in results.records):
        yield f"{TOO_GOOD} {_BETTER_THAN_FLOOR}"
    reasons: dict[tuple[Status, str], list[str]] = {}
    for record in results.records:
        if record.reason is not None:
            runs = reasons.setdefault((record.status, record.reason), [])
            runs.append(f"{record.case} {record.engine} {record.mode}")
    for (status, reason), runs in reasons.items():
        shown = runs[0] if len(runs) == 1 else f"{runs[0]} … {runs[-1]} ({len(runs)} runs)"
        yield f"{NOTHING if status is Status.UNSUPPORTED else 'failed'} {shown}: {reason}"


def _floor_notes(results: Results) -> Iterator[str]:
    """What a floor counts without a time, and why there is none."""
    reasons: dict[str, list[str]] = {}
    for case, mode in dict.fromkeys((r.case, r.mode) for r in results.records if r.figures):
        floor = results.floor(case, mode)
        if not isinstance(floor, Floor):
            reasons.setdefault(floor, []).append(f"{case} {mode}")
        elif floor.is_of_host:
            yield (
                f"{FLOOR} {case} {mode}: the host is the limit, {floor.host_ms:.1f} of plain's "
                f"{floor.plain_ms:.1f} ms; sharding's {floor.num_launches} launches are not in it"
            )
    for reason, where in reasons.items():
        yield f"no {FLOOR} for {', '.join(where)}: {reason}"


# Tables in documents.


_TABLE = re.compile(r"(<!-- shoal bench: (\w+) ([\w,]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_NOT_MEASURED = "Not measured yet.\n"
_NOT_WITHIN_ROUNDS = (
    "not within rounds: the reference was measured by another call of the command, or in another "
    "number of rounds"
)
_BETTER_THAN_FLOOR = "better than the floor: the measurement is wrong, or the floor"

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
        if kind not in (*_CELLS, _FLOORS):
            raise UsageError(f"no table of {kind}: there are {', '.join((*_CELLS, _FLOORS))}")
        chosen = [Mode(mode) for mode in modes.split(",")]
        body = _NOT_MEASURED
        if results is not None:
            is_floors = kind == _FLOORS
            body = (
                _floor_table(results, chosen) if is_floors else _page_table(results, kind, chosen)
            )
        return f"{begin}\n{body}\n{end}"

    return _TABLE.sub(table, text)


def _page_table(results: Results, kind: str, modes: Sequence[Mode]) -> str:
    shown = [(mode, engine) for mode in modes for engine in ENGINES]
    reached = [r for r in results.records if r.figures and (r.mode, r.engine) in shown]
    reached.sort(key=lambda record: shown.index((record.mode, record.engine)))
    cases = [case.name for case in CASES if case.name in {record.case for record in reached}]
    if not reached:
        return _NOT_MEASURED
    cell, lines = _CELLS[kind], [["", *cases], ["---"] * (len(cases) + 1)]
    for mode, of_mode in groupby(reached, key=lambda r: r.mode):
        name = "{}" if len(modes) == 1 else f"{{}}, {mode}"
        for engine, records in groupby(of_mode, key=lambda r: r.engine):
            by_case = {record.case: record for record in records}
            found = (by_case.get(case) for case in cases)
            cells = (cell(results, r, r.figures) if r and r.figures else NOTHING for r in found)
            lines.append([name.format(engine), *cells])
        floors = [results.floor(case, mode) for case in cases]
        if kind in _FLOOR_CELLS and any(isinstance(floor, Floor) for floor in floors):
            told = _FLOOR_CELLS[kind]
            cells = (told(floor) if isinstance(floor, Floor) else NOTHING for floor in floors)
            lines.append([name.format(f"*{FLOOR}*"), *cells])
    table = _markdown(lines)
    return f"{table}\n{' '.join(_page_notes(results, reached, table))}\n"


def _floor_table(results: Results, modes: Sequence[Mode]) -> str:
    """What each floor is made of."""
    lines = [["", *_FLOOR_PARTS], ["---"] * (len(_FLOOR_PARTS) + 1)]
    plains: list[Record] = []
    for mode in modes:
        for case in (case.name for case in CASES if case.name in results.cases):
            floor, plain = results.floor(case, mode), results.find(case, REFERENCES[0], mode)
            if plain is None or not isinstance(floor, Floor):
                continue
            plains.append(plain)
            name = case if len(modes) == 1 else f"{case}, {mode}"
            lines.append([name, *(told(floor) for told in _FLOOR_PARTS.values())])
    if not plains:
        return _NOT_MEASURED
    table = _markdown(lines)
    return f"{table}\n{' '.join(_page_notes(results, plains, table))}\n"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


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
        yield f"{ELSEWHERE}: {_NOT_WITHIN_ROUNDS}."
    if UPPER_BOUND in table:
        yield f"{UPPER_BOUND}: an upper bound, with kernels that stand for the network."
    if TOO_GOOD in table:
        yield f"{TOO_GOOD}: {_BETTER_THAN_FLOOR}."


def _ratio_cell(results: Results, record: Record, figures: Figures) -> str:
    mark = UPPER_BOUND if UPPER_BOUND in milliseconds(figures) else ""
    return ratio(results, record, REFERENCES[0]) + mark + _too_good(results, record)


def _milliseconds_cell(results: Results, record: Record, figures: Figures) -> str:
    return milliseconds(figures) + _too_good(results, record)


def _estimated(ms: float, floor: Floor) -> str:
    return f"{'' if floor.forward_is_measured else '≈ '}{ms:.1f}"


_FLOORS = "floors"
_CELLS: dict[str, Cell] = {
    "ratios": _ratio_cell,
    "milliseconds": _milliseconds_cell,
    "memory": lambda results, record, figures: gibibytes(figures.memory),
}
_FLOOR_CELLS: dict[str, Callable[[Floor], str]] = {
    "ratios": lambda floor: f"{floor.ratio:.2f}",
    "milliseconds": lambda floor: f"{floor.ms:.1f}",
}
_FLOOR_PARTS: dict[str, Callable[[Floor], str]] = {
    "forward": lambda floor: _estimated(floor.forward_ms, floor),
    "casts": lambda floor: f"{floor.casts_ms:.2f}",
    "first gather": lambda floor: f"{floor.first_gather_ms:.1f}",
    "link in forward": lambda floor: f"{floor.forward_link_ms:.1f}",
    "backward": lambda floor: _estimated(floor.backward_ms, floor),
    "gradients": lambda floor: f"{floor.gradients_ms:.2f}",
    "last reduction": lambda floor: f"{floor.last_reduction_ms:.1f}",
    "link in backward": lambda floor: f"{floor.backward_link_ms:.1f}",
    "floor": lambda floor: f"{floor.ms:.1f}",
    "× plain": lambda floor: f"{floor.ratio:.2f}",
    "collectives": lambda floor: str(floor.num_collectives),
    "launches": lambda floor: str(floor.num_launches),
}
