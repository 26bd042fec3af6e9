"""A results file: what was measured, with what, on what, by which command.

docs/bench.md describes the JSON field by field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from shoal import files
from shoal.bench.cases import Case, Mode
from shoal.bench.figures import ComputeRound, Figures, Gathers, OptimizerRound
from shoal.bench.floor import Floor, floor_of
from shoal.bench.host import Host
from shoal.errors import UsageError

SCHEMA = 2
_READ = (1, SCHEMA)
"""Schema 1 has the memory of each round beside its times; the figures say the same."""
_FLOORS = "floors"


class Status(StrEnum):
    """How a run ended."""

    OK = "ok"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One call of the command, on one machine."""

    command: str
    created: str
    """ISO 8601, UTC."""
    host: Host
    settings: Mapping[str, object]
    file: str | None = None
    """The results file it was merged from; None in that file itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The outcome of one run."""

    case: str
    engine: str
    mode: Mode
    device: str
    status: Status
    reason: str | None = None
    """Why there are no figures."""
    figures: Figures | None = None
    compute_rounds: tuple[ComputeRound, ...] = ()
    optimizer_rounds: tuple[OptimizerRound, ...] = ()
    took_s: float | None = None
    """How long the case took in this mode, all engines and their processes' start included."""
    source: int = 0
    """Index into the results' sources."""

    def __post_init__(self) -> None:
        if (self.status is Status.OK) != (self.figures is not None):
            raise ValueError(f"a run has figures exactly if it is ok, got {self}")
        if (self.status is Status.OK) != (self.reason is None):
            raise ValueError(f"a run has a reason exactly if it is not ok, got {self}")

    @property
    def key(self) -> tuple[str, str, Mode]:
        """What is measured once per results file."""
        return self.case, self.engine, self.mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Everything that one table shows."""

    quick: bool
    sources: tuple[Source, ...]
    cases: Mapping[str, Mapping[str, object]]
    """Each case as it was when it was measured, by name."""
    records: tuple[Record, ...]
    merged_by: str | None = None
    """The command that merged several files into this one."""

    def __post_init__(self) -> None:
        keys = [record.key for record in self.records]
        if len(set(keys)) != len(keys):
            raise ValueError("a run stands twice in the results; merge keeps one of them")
        for record in self.records:
            if record.case not in self.cases or record.source >= len(self.sources):
                raise ValueError(f"{record.key} refers to a case or source that is not there")

    def floor(self, case: str, mode: Mode) -> Floor | str:
        """The limit for sharded engines in a case and mode, or why there is none."""
        plain = self.find(case, "plain", mode)
        if plain is None or plain.figures is None:
            return "plain was not measured"
        described = self.cases[case]
        return floor_of(described, plain.device, plain.figures, plain.compute_rounds)

    def find(self, case: str, engine: str, mode: Mode) -> Record | None:
        """The record of one run."""
        for record in self.records:
            if record.key == (case, engine, mode):
                return record
        return None


def describe_case(case: Case) -> dict[str, object]:
    """A case as JSON; what JSON cannot say (a network of no cost) in words."""
    fields = asdict(case)
    fields["hidden_dim"] = case.shape.hidden_dim
    return json.loads(json.dumps(fields))


def write_results(results: Results, path: Path) -> None:
    """Write the file in one piece, so that a cut never leaves half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"schema": SCHEMA, **asdict(results), _FLOORS: _floors(results)}
    files.replace(path, (json.dumps(document, indent=1) + "\n").encode()).close()


def _floors(results: Results) -> list[dict[str, object]]:
    """The limits beside the figures, for who reads the file. They follow from what it says."""
    found: list[dict[str, object]] = []
    for case, mode in dict.fromkeys((r.case, r.mode) for r in results.records if r.figures):
        floor = results.floor(case, mode)
        if isinstance(floor, Floor):
            told = {**asdict(floor), "plain_ms": floor.plain_ms, "ms": floor.ms}
            found.append({"case": case, "mode": mode, **told, "ratio": floor.ratio})
        else:
            found.append({"case": case, "mode": mode, "reason": floor})
    return found


def read_results(path: Path) -> Results:
    """Read a file that `write_results` wrote."""
    try:
        with files.open_regular(path, follow=True) as file:
            document = json.loads(file.read())
    except OSError as error:
        raise UsageError(f"cannot read results file {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON ({error}): name a file `shoal bench` wrote") from None
    found = document.get("schema") if isinstance(document, dict) else None
    if found not in _READ:
        raise UsageError(
            f"{path} has schema {found!r}, this version of shoal reads {SCHEMA}: "
            "name a file `shoal bench` wrote, or measure again"
        )
    del document["schema"]
    document.pop(_FLOORS, None)  # made anew by whoever asks
    try:
        return _read(Results, document)
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path} is not a results file of `shoal bench`: {type(error).__name__}: {error}"
        ) from error


def _read(kind: Any, value: Any) -> Any:
    """A value of a declared type, as JSON says it."""
    declared = get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        if kind in (ComputeRound, OptimizerRound):  # in schema 1, with their memory
            value = {name: value[name] for name in hints if name in value}
        given = {name: _read(hints.get(name), one) for name, one in value.items()}
        return cast(type, kind)(**given)
    if get_origin(kind) is tuple:
        return tuple(_read(declared[0], one) for one in value)
    if get_origin(kind) is UnionType:
        return None if value is None else _read(declared[0], value)
    return kind(value) if kind in (Mode, Status, Gathers) else value


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
