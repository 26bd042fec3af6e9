"""Collectives in a joined loop that are not the engine's: refused by name, before the launch.

Ranks that have no more inputs do not run the loop, so nobody would answer there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal._torch import collectives

_PASSED_THROUGH = ("torch.", "shoal.")
_OF_THE_STEP = ("shoal.runtime.context", "shoal.runtime.unit", "shoal.uneven.")
"""Where the collectives of a step come from, which shadows launch too."""


@contextmanager
def refusing_collectives(is_mirrored: Callable[[], bool]) -> Iterator[None]:
    """Refuse collectives of others, unless every rank makes the call that they come from."""

    def hear(name: str) -> None:
        if not is_mirrored() and not _is_of_the_step():
            raise NotImplementedError(
                f"shoal.join: the collective {name.strip('_')!r} is not part of a sharded model's "
                "step, and ranks that have no more inputs do not take part in it, so it would "
                "hang. Call it after the block, keep a local sum in the loop, or give join the "
                "gradient scaler that it belongs to."
            )

    library = collectives.before_collectives(hear)
    try:
        yield
    finally:
        collectives.stop_hearing(library)


def _is_of_the_step() -> bool:
    """Whether the engine's step is what launches a collective: no code of users is in between."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_OF_THE_STEP):
            return True
        if not f"{module}.".startswith(_PASSED_THROUGH):
            return False
        frame = frame.f_back
    return False
