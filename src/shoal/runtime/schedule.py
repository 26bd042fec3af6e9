"""The order in which units compute; pure data, from which prefetching follows."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Order(Generic[T]):
    """Units in forward order; backward goes the other way.

    A unit that runs several times counts where it ran first: the order is a hint for
    prefetching, and a step that leaves it is gathered on demand.
    """

    units: tuple[T, ...]
    _positions: dict[T, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", tuple(dict.fromkeys(self.units)))
        object.__setattr__(self, "_positions", {unit: i for i, unit in enumerate(self.units)})

    def after(self, unit: T) -> T | None:
        """The unit that computes next in forward."""
        return self._at(self._positions.get(unit, len(self.units)) + 1)

    def before(self, unit: T) -> T | None:
        """The unit that computes next in backward."""
        return self._at(self._positions.get(unit, 0) - 1)

    @property
    def last(self) -> T | None:
        """The unit that computes last in forward."""
        return self.units[-1] if self.units else None

    def _at(self, position: int) -> T | None:
        return self.units[position] if 0 <= position < len(self.units) else None
