"""Judging what a pool found out about one run: did every rank end it, and how?"""

from __future__ import annotations

import pickle
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from harness.failures import RankDied, RankFailed, RankHung
from harness.messages import Ending, Outcome

_LAST_WORDS = 4000
"""Characters of a dead rank's output that its failure quotes."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """What is known of each rank, by rank: an outcome, a death, or where it still is."""

    world_size: int
    timeout_s: float
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    deaths: dict[int, int | None] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    output: dict[int, str] = field(default_factory=dict)

    def missing(self) -> list[int]:
        """Return the ranks that are still at work."""
        known = self.outcomes.keys() | self.deaths.keys()
        return [rank for rank in range(self.world_size) if rank not in known]

    def raised(self) -> list[int]:
        """Return the ranks that raised, the first to do so first."""
        return [rank for rank, ended in self.outcomes.items() if ended.ending is Ending.RAISED]

    def broken(self) -> bool:
        """Whether the run cannot succeed any more."""
        return bool(self.deaths or self.raised())

    def place(self, rank: int) -> str:
        """Say in full how a rank ended, or where it is."""
        if rank in self.deaths:
            return f"{_how_it_ended(self.deaths[rank])}\n{self.output[rank][-_LAST_WORDS:]}"
        if rank in self.stacks:
            return f"still running\n{self.stacks[rank]}"
        outcome = self.outcomes[rank]
        return outcome.traceback or f"{outcome.ending} {outcome.error}".strip()


def show_output(findings: Findings) -> None:
    """Print what the ranks printed, for pytest to show beside a failure (or at once, with -s)."""
    for rank, text in findings.output.items():
        for line in text.splitlines():
            print(f"[rank {rank}] {line}")


def outcomes(findings: Findings) -> list[Outcome]:
    """Return each rank's outcome, in order; raise if a rank died, raised or did not finish."""
    everyone, world_size = range(findings.world_size), findings.world_size
    missing = findings.missing()
    # A death comes first: the others' errors are mostly lost connections to the dead rank.
    if findings.deaths:
        rank, exitcode = next(iter(findings.deaths.items()))
        kind, headline = RankDied, f"rank {rank} of {world_size} {_how_it_ended(exitcode)}"
    elif raised := findings.raised():
        rank = raised[0]
        error = findings.outcomes[rank].error
        kind, headline = RankFailed, f"rank {rank} of {world_size} failed: {error}"
    elif missing:
        rank = missing[0]
        names = ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing))
        kind = RankHung
        headline = f"{names} of {world_size} did not finish within {findings.timeout_s:g} s"
    else:
        return [findings.outcomes[rank] for rank in everyone]
    others = {other: findings.place(other) for other in everyone if other != rank}
    raise kind(headline, rank=rank, traceback=findings.place(rank), others=others)


def values(ended: Sequence[Outcome]) -> list[Any]:
    """Return what the ranks returned; pass on a skip or an xfail that all of them agree on."""
    endings = {outcome.ending for outcome in ended}
    if endings == {Ending.RETURNED}:
        return [pickle.loads(outcome.payload) for outcome in ended]
    if endings == {Ending.SKIPPED}:
        pytest.skip(ended[0].error)
    if endings == {Ending.XFAILED}:
        pytest.xfail(ended[0].error)
    places = {rank: f"{outcome.ending} {outcome.error}" for rank, outcome in enumerate(ended)}
    rank = next(rank for rank, outcome in enumerate(ended) if outcome.ending != Ending.RETURNED)
    raise RankFailed(
        f"rank {rank} of {len(ended)} {places[rank]}, but others did not; "
        "let all ranks decide alike",
        rank=rank,
        traceback=places.pop(rank),
        others=places,
    )


def _how_it_ended(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"died with exit code {exitcode}"
    return f"died of {signal.Signals(-exitcode).name}"
