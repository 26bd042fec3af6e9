"""`metrics.jsonl` read into typed records; a line that cannot be read is named, not fatal."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from reprlib import repr as short
from typing import cast

from shoal.files import open_regular

NAN = math.nan
MOST_STEPS = 2**53
"""Steps are drawn by their number as a float, which counts so far."""
_MOST_LINE_BYTES = 1 << 20
_LARGEST = 1e100
"""Beyond it a number counts as infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step; a number that was not recorded is NaN.

    `tflops_per_s` are those of one rank, and `mfu` their part of what its device can do.
    `tokens` counts all tokens of the run so far; `memory_bytes`, and `own_ms`, the time that a rank
    did not wait for others, have one entry per rank.
    """

    step: int
    loss: float
    lr: float = NAN
    grad_norm: float = NAN
    tokens: float = NAN
    tokens_per_s: float = NAN
    tflops_per_s: float = NAN
    mfu: float = NAN
    step_ms: float = NAN
    compute_ms: float = NAN
    exposed_ms: float = NAN
    optimizer_ms: float = NAN
    memory_bytes: tuple[float, ...] = ()
    own_ms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRecord:
    """The loss on held-out data after a step."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRecord:
    """The run went on from a checkpoint of `step`, on so many ranks; 0 where that is unknown."""

    step: int
    num_ranks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Everything that was recorded, in the order of the steps, and what could not be read."""

    steps: tuple[StepRecord, ...] = ()
    validations: tuple[ValidationRecord, ...] = ()
    resumes: tuple[ResumeRecord, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        """The most ranks that reported their memory in one step."""
        return max((len(record.memory_bytes) for record in self.steps), default=0)

    @property
    def rank_counts(self) -> tuple[int, ...]:
        """How many ranks the run had, one after the other: (2, 4) when it went on with 4."""
        by_step = [(record.step, len(record.memory_bytes)) for record in self.steps]
        # A resume from a step comes after that step.
        by_step += [(record.step + 0.5, record.num_ranks) for record in self.resumes]
        counts = [number for _, number in sorted(by_step) if number]
        return tuple(number for number, _ in groupby(counts))


NUMBERS = tuple(field.name for field in fields(StepRecord) if field.default is NAN)
"""Of a step: what may be NaN, apart from the loss."""

_Record = StepRecord | ValidationRecord | ResumeRecord


def read_metrics(path: Path) -> Metrics:
    """Read the file; a step that was run again after a resume counts as it ran last.

    A resume after which no step was taken changed nothing, and is left out.
    """
    found: dict[tuple[type[_Record], int], _Record] = {}
    problems: list[str] = []
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            record = _parse(line.decode(errors="replace"))
        except (ValueError, RecursionError) as error:
            problems.append(f"{path.name}, line {number}: {error}; the line was left out")
            continue
        found[type(record), record.step] = record
    ordered = sorted(found.values(), key=lambda record: record.step)
    steps = tuple(record for record in ordered if isinstance(record, StepRecord))
    last = steps[-1].step if steps else 0
    return Metrics(
        steps=steps,
        validations=tuple(record for record in ordered if isinstance(record, ValidationRecord)),
        resumes=tuple(
            record for record in ordered if isinstance(record, ResumeRecord) and record.step < last
        ),
        problems=tuple(problems),
    )


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file that may hold anything; of one that is too long, the beginning."""
    with open_regular(path) as raw, io.BufferedReader(cast(io.RawIOBase, raw)) as file:
        while line := file.readline(_MOST_LINE_BYTES):
            yield line
            while not line.endswith(b"\n") and line:
                line = file.readline(_MOST_LINE_BYTES)


def _parse(line: str) -> _Record:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(content, dict):
        raise ValueError(f"expected an object, got {type(content).__name__}")
    kind = content.get("kind")
    if kind not in ("step", "validation", "resume"):
        raise ValueError(f"expected kind 'step', 'validation' or 'resume', got {short(kind)}")
    step = content.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < MOST_STEPS:
        raise ValueError(f"expected a step number, got {short(step)}")
    if kind == "resume":
        return ResumeRecord(step=step, num_ranks=_num_ranks(content.get("num_ranks")))
    if "loss" not in content:
        raise ValueError("it has no loss")
    loss = _float(content["loss"], "loss")
    if kind == "validation":
        return ValidationRecord(step=step, loss=loss)
    numbers = {name: _float(content.get(name), name) for name in NUMBERS}
    memory_bytes, own_ms = (_per_rank(content.get(n), n) for n in ("memory_bytes", "own_ms"))
    return StepRecord(step=step, loss=loss, memory_bytes=memory_bytes, own_ms=own_ms, **numbers)


def _num_ranks(value: object) -> int:
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**32:
        raise ValueError(f"num_ranks should be a whole number above 0, got {short(value)}")
    return value


def _per_rank(value: object, name: str) -> tuple[float, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ValueError(f"{name} should be a list with a number per rank, got {short(value)}")
    return tuple(_float(item, name) for item in value)


def _float(value: object, name: str) -> float:
    if value is None:
        return NAN
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} should be a number, got {short(value)}")
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError(f"{name} is too large for a number") from error
    # Nothing that a run measures is so large, and sums of such numbers would overflow.
    return math.copysign(math.inf, number) if abs(number) > _LARGEST else number
