"""The order in which units compute; pure data, from which prefetching follows."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Order:
    """Unit names in forward order; backward goes the other way.

    A unit that runs several times counts where it ran first: the order is a hint for
    prefetching, and a step that leaves it is gathered on demand.
    """

    units: tuple[str, ...]
    _positions: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", tuple(dict.fromkeys(self.units)))
        object.__setattr__(self, "_positions", {name: i for i, name in enumerate(self.units)})

    def after(self, unit: str) -> str | None:
        """The unit that computes next in forward."""
        return self._at(self._positions.get(unit, len(self.units)) + 1)

    def before(self, unit: str) -> str | None:
        """The unit that computes next in backward."""
        return self._at(self._positions.get(unit, 0) - 1)

    def _at(self, position: int) -> str | None:
        return self.units[position] if 0 <= position < len(self.units) else None
