"""What the machine asks its executor to do."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shoal.step.unit_step import UnitStep


class ActionKind(StrEnum):
    """What is done for a unit."""

    COPY = "copy"
    """Start copying its shards from the host to where they are gathered from."""
    DISCARD = "discard"
    """Give that copy up unread."""
    GATHER = "gather"
    """Launch its all-gather; it reads the copy, if there is one, until it is waited for."""
    WAIT = "wait"
    """Wait for it, and lay the full parameters out."""
    CANCEL = "cancel"
    """Wait for it, and give the memory back unread."""
    WAKE = "wake"
    """Full parameters that stayed are about to be computed with."""
    FORWARD = "forward"
    """Compute."""
    BACKWARD = "backward"
    """Compute."""
    REST = "rest"
    """The full parameters stay, and nothing computes with them."""
    KEEP = "keep"
    """Take the full parameters' memory away, but for the piece that backward gathers from."""
    DROP = "drop"
    """Give that piece up."""
    FREE = "free"
    """Take the full parameters' memory away, and whatever was kept of them."""
    FOLLOW = "follow"
    """Look whether its shards were moved or replaced, since nothing has in this step."""
    TAKE = "take"
    """Take the gradients off the full parameters."""
    SUM = "sum"
    """Add the gradients to those that wait for a later reduction."""
    PACK = "pack"
    """Copy the gradients that were taken into one matrix, and give their memory back."""
    REDUCE = "reduce"
    """Launch the reduction of that matrix."""
    FINISH = "finish"
    """Wait for the reduction, and give its memory back."""
    PLACE = "place"
    """Put reduced gradients on the shards; of all units, when the step ends."""
    REFUSE_CHANGED = "refuse, changed"
    """Raise: the parameters were changed between forward and backward."""
    REFUSE_BLIND = "refuse, blind"
    """Raise: backward came to freed parameters, past the outputs of their module."""


class Action(NamedTuple):
    """One thing to do."""

    kind: ActionKind
    unit: UnitStep

    def __str__(self) -> str:
        return f"{self.kind} {self.unit.name}"


Actions = tuple[Action, ...]
OF_FULL = frozenset({ActionKind.GATHER, ActionKind.CANCEL, ActionKind.KEEP, ActionKind.FREE})
"""The kinds that take a unit's gathered bytes, or give them back."""
UNDONE = frozenset(
    {
        *(ActionKind.COPY, ActionKind.GATHER, ActionKind.WAIT),
        *(ActionKind.FORWARD, ActionKind.BACKWARD),
    }
)
"""The kinds that have not happened if their executor raises; of others the effect is there."""


def described(kind: str, unit: str, num_bytes: int) -> str:
    """A line that tells of an action, planned or performed, with the bytes that move or go."""
    size = f"  {num_bytes / 2**20:.1f} MiB" if num_bytes else ""
    return f"{kind:>10}  {unit}{size}"
