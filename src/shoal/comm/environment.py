"""The environment variables that communication reads: all of them, and only here."""

from __future__ import annotations

import os


def debugs_collectives() -> bool:
    """Whether ranks compare every collective before they launch it: `SHOAL_DEBUG=collectives`."""
    return "collectives" in os.environ.get("SHOAL_DEBUG", "").split(",")
