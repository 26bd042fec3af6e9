"""Naming ranks that hold the others up."""

from __future__ import annotations

from collections import deque
from statistics import median

from shoal.train.told import Told

_NUM_STEPS = 10
_FACTOR = 1.5
_LEAST_MS = 5.0
"""Less than this is noise, whatever the factor."""


class Stragglers:
    """Compares the ranks' own time, without waits, over the last steps.

    A slow rank makes all others wait, so their step takes as long as its own; what they did
    themselves does not.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[float, ...]] = deque(maxlen=_NUM_STEPS)

    def notes(self, step: int, told: Told) -> list[str]:
        """Name the ranks that were slow in the last steps, once for each such stretch."""
        self._recent.append(tuple(word.own_ms for word in told.words))
        if step % _NUM_STEPS or len(self._recent) < _NUM_STEPS:
            return []
        typical = [median(times) for times in zip(*self._recent, strict=True)]
        usual = median(typical)
        return [
            f"step {step}: rank {rank} holds the others up: {own:.0f} ms of its own per step, "
            f"where {usual:.0f} ms are usual"
            for rank, own in enumerate(typical)
            if own > _FACTOR * usual and own > usual + _LEAST_MS
        ]
