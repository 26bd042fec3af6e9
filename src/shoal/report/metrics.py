"""`metrics.jsonl` read into typed records; a line that cannot be read is named, not fatal."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

NAN = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step; a number that was not recorded is NaN.

    `tokens` counts all tokens of the run so far, and `memory_bytes` has one entry per rank.
    """

    step: int
    loss: float
    lr: float = NAN
    grad_norm: float = NAN
    tokens: float = NAN
    tokens_per_s: float = NAN
    step_ms: float = NAN
    compute_ms: float = NAN
    exposed_ms: float = NAN
    optimizer_ms: float = NAN
    memory_bytes: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRecord:
    """The loss on held-out data after a step."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Everything that was recorded, in the order of the steps, and what could not be read."""

    steps: tuple[StepRecord, ...] = ()
    validations: tuple[ValidationRecord, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        """How many ranks reported their memory."""
        return max((len(record.memory_bytes) for record in self.steps), default=0)


_NUMBERS = (
    "lr",
    "grad_norm",
    "tokens",
    "tokens_per_s",
    "step_ms",
    "compute_ms",
    "exposed_ms",
    "optimizer_ms",
)


def read_metrics(path: Path) -> Metrics:
    """Read the file; a step that was run again after a resume counts as it ran last."""
    steps: dict[int, StepRecord] = {}
    validations: dict[int, ValidationRecord] = {}
    problems: list[str] = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = _parse(line)
            except (ValueError, RecursionError) as error:
                problems.append(f"{path.name}, line {number}: {error}; the line was left out")
                continue
            if isinstance(record, StepRecord):
                steps[record.step] = record
            else:
                validations[record.step] = record
    return Metrics(
        steps=tuple(steps[step] for step in sorted(steps)),
        validations=tuple(validations[step] for step in sorted(validations)),
        problems=tuple(problems),
    )


def _parse(line: str) -> StepRecord | ValidationRecord:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object, got {type(fields).__name__}")
    kind = fields.get("kind")
    if kind not in ("step", "validation"):
        raise ValueError(f"expected kind 'step' or 'validation', got {kind!r}")
    step = fields.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"expected a step number, got {step!r}")
    if "loss" not in fields:
        raise ValueError("it has no loss")
    loss = _number(fields, "loss")
    if kind == "validation":
        return ValidationRecord(step=step, loss=loss)
    numbers = {name: _number(fields, name) for name in _NUMBERS}
    return StepRecord(step=step, loss=loss, memory_bytes=_memory(fields), **numbers)


def _number(fields: dict[str, object], name: str) -> float:
    value = fields.get(name)
    if value is None:
        return NAN
    return _float(value, name)


def _memory(fields: dict[str, object]) -> tuple[float, ...]:
    value = fields.get("memory_bytes")
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ValueError(f"memory_bytes should be a list with a number per rank, got {value!r}")
    return tuple(NAN if item is None else _float(item, "memory_bytes") for item in value)


def _float(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} should be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{name} is too large for a number") from error
