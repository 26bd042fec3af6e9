"""What a unit is doing.

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


class Phase(StrEnum):
    """The phases of a unit."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    HELD = "held"
    FORWARD = "forward"
    BACKWARD = "backward"


COMPUTING = (Phase.FORWARD, Phase.BACKWARD)
"""The phases in which full parameters are read."""
