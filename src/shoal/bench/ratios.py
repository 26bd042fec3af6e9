"""How much longer than a reference: within the rounds, and in the quietest."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from shoal.bench.figures import of_round
from shoal.bench.results import Record, Results


@dataclass(frozen=True, slots=True)
class Ratio:
    """Forward+backward of a run over that of a reference, in the same case and mode."""

    median: float | None
    """Over the rounds, of the ratio within a round, in which both had their turn. None where the
    reference was measured by another call of the command, or in another number of rounds."""
    quietest: float
    """Of the quietest round of each."""


def ratio_of(results: Results, record: Record, reference: str) -> Ratio | None:
    """The ratio to an engine; None where either has no figures."""
    other = results.find(record.case, reference, record.mode)
    if record.figures is None or other is None or other.figures is None:
        return None
    quietest = record.figures.forward_backward_ms / other.figures.forward_backward_ms
    of_run, of_reference = _rounds(record), _rounds(other)
    if record.source != other.source or not of_run or len(of_run) != len(of_reference):
        return Ratio(None, quietest)
    within = (mine / its for mine, its in zip(of_run, of_reference, strict=True))
    return Ratio(statistics.median(within), quietest)


def _rounds(record: Record) -> list[float]:
    """What stands for each round."""
    if record.figures is None:
        return []
    device_type = record.figures.device_type
    return [of_round(device_type, one.forward_backward_ms) for one in record.compute_rounds]
