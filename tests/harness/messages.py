"""What travels between pytest's process and a rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from harness.setup import Setup

WarningFilter = tuple[Any, str, Any, str, int]
"""The arguments of `warnings.filterwarnings`: action, message, category, module, line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One rank's place in a pool: all that its process needs to start."""

    rank: int
    world_size: int
    setup: Setup
    store_port: int
    prefix: str
    folder: Path

    @property
    def output(self) -> Path:
        """Where the rank's stdout and stderr go."""
        return self.folder / f"rank{self.rank}.out"

    @property
    def stacks(self) -> Path:
        """Where the rank writes its threads' stacks when asked by signal."""
        return self.folder / f"rank{self.rank}.stacks"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that this rank sees and pytest's process does not."""
        return self.setup.environment(self.rank, self.world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """Ask a rank to leave its process groups and meet the others in a new default group."""

    prefix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Ask a rank to run one function, in the surroundings that the test has in pytest's process."""

    module: str
    file: str
    qualname: str
    payload: bytes
    """Positional and keyword arguments, pickled apart: they may name types of `file`."""
    environment: dict[str, str]
    folder: str
    filters: tuple[WarningFilter, ...]


class Ending(StrEnum):
    """How a rank's run ended."""

    RETURNED = "returned"
    RAISED = "raised"
    SKIPPED = "skipped"
    XFAILED = "xfailed"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """What a run left of the rank's process groups."""

    sequence: int
    """Collectives that the default group has seen: ranks that differ are out of step."""
    disturbed: bool
    """Whether groups were added, or the default one replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A rank's answer."""

    ending: Ending
    groups: GroupState
    payload: bytes = b""
    """The returned value, pickled; empty unless `RETURNED`."""
    error: str = ""
    """Type and message of what was raised; for a skip, its reason."""
    traceback: str = ""
