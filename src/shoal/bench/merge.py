"""One table from several short measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shoal.bench.results import Record, Results, Source, Status, read_results
from shoal.errors import UsageError


def merge_files(paths: Sequence[Path], command: str) -> Results:
    """Read results files and merge them; `command` is what asked for it."""
    return merge([(path.name, read_results(path)) for path in paths], command)


def merge(named: Sequence[tuple[str, Results]], command: str) -> Results:
    """Merge results; where a run stands in several, the newest that is ok counts.

    Refused is what would make ratios of unlike things: quick results beside full ones, and one case
    measured in two versions, on two devices or with two releases of torch.
    """
    if not named:
        raise UsageError("--merge needs at least one results file")
    if len({results.quick for _, results in named}) > 1:
        quick = ", ".join(name for name, results in named if results.quick)
        raise UsageError(
            f"quick results say nothing about full ones and are not merged with them; "
            f"these are quick: {quick}"
        )
    by_date = sorted(named, key=lambda pair: pair[1].sources[-1].created)
    sources: list[Source] = []
    cases: dict[str, Mapping[str, object]] = {}
    records: dict[tuple[str, ...], Record] = {}
    for name, results in by_date:
        for case, description in results.cases.items():
            if _work(cases.setdefault(case, description)) != _work(description):
                raise UsageError(
                    f"case {case} in {name} is not the {case} of the other files: "
                    "measure it again with one version of shoal"
                )
        for record in results.records:
            moved = replace(record, source=record.source + len(sources))
            kept = records.get(record.key)
            if kept is None or moved.status is Status.OK or kept.status is not Status.OK:
                records[record.key] = moved
        sources.extend(replace(source, file=source.file or name) for source in results.sources)
    merged = Results(
        quick=by_date[0][1].quick,
        sources=tuple(sources),
        cases=cases,
        records=tuple(records.values()),
        merged_by=command,
    )
    _check_alike(merged)
    return merged


def _work(case: Mapping[str, object]) -> dict[str, object]:
    """A case without how it was measured, which files may differ in."""
    how = ("pace", "gib_each", "gib_together")
    return {field: value for field, value in case.items() if field not in how}


def _check_alike(results: Results) -> None:
    """Refuse a case whose figures come from two devices or two releases of torch."""
    seen: dict[str, tuple[str, str]] = {}
    for record in results.records:
        if record.status is not Status.OK:
            continue
        place = record.device, results.sources[record.source].host.torch
        first = seen.setdefault(record.case, place)
        if first != place:
            raise UsageError(
                f"{record.case} was measured on {' with torch '.join(first)} and on "
                f"{' with torch '.join(place)}: ratios between them mean nothing; "
                "merge files of one machine"
            )
