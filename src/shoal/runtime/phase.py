"""What a unit is doing: one enum, one table of allowed transitions.

| phase     | registered on the module | full parameters | left when                          |
|-----------|--------------------------|-----------------|------------------------------------|
| SHARDED   | shards                   | no memory       | a gather is launched               |
| GATHERING | shards                   | being written   | it is waited for, or given up      |
| HELD      | full                     | valid           | a computation or a reshard begins  |
| FORWARD   | full                     | valid           | the module's forward returns       |
| BACKWARD  | full                     | valid           | backward has left the module       |

Recomputation of activations enters a unit's forward while it is in BACKWARD; the unit stays
there, because its parameters are needed until backward has left it.
"""

from __future__ import annotations

from enum import StrEnum

from shoal.errors import TransitionError


class Phase(StrEnum):
    """The phases of a unit."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    HELD = "held"
    FORWARD = "forward"
    BACKWARD = "backward"


ALLOWED = frozenset(
    {
        (Phase.SHARDED, Phase.GATHERING),
        (Phase.GATHERING, Phase.HELD),
        (Phase.GATHERING, Phase.SHARDED),
        (Phase.HELD, Phase.FORWARD),
        (Phase.HELD, Phase.BACKWARD),
        (Phase.HELD, Phase.SHARDED),
        (Phase.FORWARD, Phase.HELD),
        (Phase.BACKWARD, Phase.HELD),
    }
)


def check_transition(unit: str, old: Phase, new: Phase) -> None:
    """Raise unless a unit may go from `old` to `new`."""
    if (old, new) not in ALLOWED:
        allowed = sorted(after for before, after in ALLOWED if before is old)
        raise TransitionError(
            f"unit {unit!r} cannot go from {old} to {new}; from {old} it can go to "
            f"{', '.join(allowed)}. This is a bug in shoal, or a hook that calls into the engine."
        )
