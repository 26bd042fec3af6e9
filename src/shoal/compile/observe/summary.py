"""All compilations of a program, as a table for people."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.compile.observe.dynamo import Break, Recompile
from shoal.compile.observe.record import CacheUse, CompileRecord

_NUMBERS = {
    "in": "num_inputs",
    "out": "num_outputs",
    "mutated": "num_mutated",
    "saved": "num_saved",
    "saved bytes": "saved_bytes",
    "nodes": "num_nodes_before",
    "forward": "num_nodes_forward",
    "backward": "num_nodes_backward",
    "collectives": "num_collectives",
}
"""The columns that are fields of a record."""
_ADDED_UP = ("saved", "saved bytes", "collectives")
COLUMNS = ("graph", "begins at", *_NUMBERS, "cache", "seconds")
_WORDS = ("graph", "begins at", "cache")
"""The columns that are no numbers."""


def render(
    records: Sequence[CompileRecord], breaks: Sequence[Break], recompiles: Sequence[Recompile]
) -> RenderableType:
    """The table, and under it why graphs broke, came again, or could not be cached."""
    table = Table(title="shoal explain", show_footer=bool(records))
    for name, total in zip(COLUMNS, _totals(records), strict=True):
        side = "left" if name in _WORDS else "right"
        table.add_column(name, justify=side, footer=total, overflow="fold")
    for record in records:
        table.add_row(*_row(record))
    lines = [
        f"{_several(len(records), 'graph')}, {_several(len(breaks), 'break')}, "
        f"{_several(len(recompiles), 'recompilation')}"
    ]
    lines += _counted("break", ((one.where, one.headline) for one in breaks))
    lines += _counted(
        "again", ((one.where, f"{one.function}: {_guard(one.reason)}") for one in recompiles)
    )
    lines += _passes(records)
    lines += [
        f"not cached: graph {record.number}: {record.cache_note}"
        for record in records
        if record.cache is CacheUse.REFUSED
    ]
    shown: list[RenderableType] = [table] if records else []
    return Group(*shown, *(Text(line) for line in lines))


def _row(record: CompileRecord) -> tuple[str, ...]:
    return (
        str(record.number),
        _short(record.where),
        *(f"{getattr(record, field):,}" for field in _NUMBERS.values()),
        str(record.cache),
        f"{record.total_seconds:.2f}",
    )


def _totals(records: Sequence[CompileRecord]) -> tuple[str, ...]:
    hits = sum(record.cache is CacheUse.HIT for record in records)
    known = {
        "graph": "all",
        **{
            name: f"{sum(getattr(record, _NUMBERS[name]) for record in records):,}"
            for name in _ADDED_UP
        },
        "cache": f"{hits} of {len(records)} hit",
        "seconds": f"{sum(record.total_seconds for record in records):.2f}",
    }
    return tuple(known.get(name, "") for name in COLUMNS)


def _counted(title: str, found: Iterable[tuple[str, str]]) -> list[str]:
    """One line for each place and reason, with how often."""
    return [
        f"{title} at {_short(where)}: {reason}" + (f" ({count} times)" if count > 1 else "")
        for (where, reason), count in Counter(found).items()
    ]


def _passes(records: Sequence[CompileRecord]) -> list[str]:
    """One line for each stage of passes: their names, in the order in which they ran."""
    ran: dict[str, dict[str, None]] = {}
    for record in records:
        for stage, report in record.passes.items():
            ran.setdefault(stage, {}).update(dict.fromkeys(step.name for step in report.steps))
    return [f"passes, {stage}: {', '.join(names)}" for stage, names in ran.items()]


def _guard(reason: str) -> str:
    """A failed guard without the numbers of the frame, by which equal ones would differ."""
    return reason.strip().partition("\n")[0].partition(": ")[2] or reason.strip()


def _short(where: str) -> str:
    """A place relative to the working folder, where it lies in there."""
    if not where:
        return "?"
    file, _, line = where.rpartition(":")
    inside = Path(file).is_relative_to(Path.cwd())
    return f"{os.path.relpath(file)}:{line}" if inside else where


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
