"""The orders in which units were seen to compute: hints by which the machine answers ahead.

An order is first the declared one; each forward then corrects it, and one that leaves every known
order becomes another variant. Whoever leaves all of them is gathered on demand.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

_MAX_VARIANTS = 8


class Orders(Generic[T]):
    """The orders of forwards, newest first; predicts how the present one goes on."""

    def __init__(self, declared: Sequence[T]) -> None:
        self._known: list[tuple[T, ...]] = [tuple(declared)]
        self._is_derived = True
        """Whether the only order is the declared one, which no forward has confirmed."""
        self._positions = _positions(self._known[0])
        self.begin()

    @property
    def variants(self) -> tuple[tuple[T, ...], ...]:
        """What was seen, newest first; what was declared, as long as nothing was."""
        return tuple(self._known)

    @property
    def position(self) -> int:
        """How many units have computed in this forward."""
        return len(self._seen)

    def begin(self) -> None:
        """A forward starts."""
        self._seen: list[T] = []
        self._expected = self._known[0]

    def enter(self, unit: T, depth: int = 1) -> tuple[T, ...]:
        """A unit computes: which ones are next, as far as can be known."""
        position = len(self._seen)
        self._seen.append(unit)
        expected = self._expected
        if position >= len(expected) or expected[position] is not unit:
            return self._leave_the_way(unit, depth)
        return expected[position + 1 : position + 1 + depth]

    def _leave_the_way(self, unit: T, depth: int) -> tuple[T, ...]:
        """Go on by another order that began like this, or by what followed the unit last time."""
        seen = tuple(self._seen)
        for order in self._known:
            if order[: len(seen)] == seen:
                self._expected = order
                return order[len(seen) : len(seen) + depth]
        return self.after(unit, depth)

    def after(self, unit: T, depth: int = 1) -> tuple[T, ...]:
        """What followed a unit in the newest forward."""
        last = self._known[0]
        position = self._positions.get(unit, len(last))
        return last[position + 1 : position + 1 + depth]

    def end(self) -> None:
        """The forward has returned: its order is the newest."""
        seen = tuple(self._seen)
        if not seen or (seen == self._known[0] and not self._is_derived):
            return
        known = [] if self._is_derived else [order for order in self._known if order != seen]
        self._known = [seen, *known][:_MAX_VARIANTS]
        self._is_derived = False
        self._positions = _positions(seen)

    def before(self, unit: T, depth: int = 1, position: int | None = None) -> tuple[T, ...]:
        """The units whose backwards come next, after the newest forward.

        `position` says which run of the unit it was; its first, if that is not known.
        """
        order = self._known[0]
        if position is None or position >= len(order) or order[position] is not unit:
            position = self._positions.get(unit, 0)
        return order[max(0, position - depth) : position][::-1]

    def last(self, depth: int = 1) -> tuple[T, ...]:
        """The units that computed last in the newest forward, the very last first."""
        return self._known[0][::-1][:depth]


def _positions(order: tuple[T, ...]) -> dict[T, int]:
    """Where each unit ran first."""
    return {unit: i for i, unit in reversed(tuple(enumerate(order)))}
