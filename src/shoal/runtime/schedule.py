"""When: the orders in which units were seen to compute, and the actions that follow from one.

Both are pure data about names or objects. An order is first derived from the declared units; each
forward then corrects it, and one that leaves every known order becomes another variant. An order is
a hint for prefetching: whoever leaves it is gathered on demand.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
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

    def begin(self) -> None:
        """A forward starts."""
        self._seen: list[T] = []
        self._expected = self._known[0]

    def enter(self, unit: T) -> T | None:
        """A unit computes: which one is next, as far as can be known."""
        position = len(self._seen)
        self._seen.append(unit)
        expected = self._expected
        if position >= len(expected) or expected[position] is not unit:
            return self._leave_the_way(unit)
        return expected[position + 1] if position + 1 < len(expected) else None

    def _leave_the_way(self, unit: T) -> T | None:
        """Go on by another order that began like this, or by what followed the unit last time."""
        seen = tuple(self._seen)
        for order in self._known:
            if order[: len(seen)] == seen:
                self._expected = order
                return order[len(seen)] if len(seen) < len(order) else None
        return self.after(unit)

    def after(self, unit: T) -> T | None:
        """What followed a unit in the newest forward."""
        last = self._known[0]
        position = self._positions.get(unit, len(last))
        return last[position + 1] if position + 1 < len(last) else None

    def end(self) -> None:
        """The forward has returned: its order is the newest."""
        seen = tuple(self._seen)
        if not seen or (seen == self._known[0] and not self._is_derived):
            return
        known = [] if self._is_derived else [order for order in self._known if order != seen]
        self._known = [seen, *known][:_MAX_VARIANTS]
        self._is_derived = False
        self._positions = _positions(seen)

    def before(self, unit: T) -> T | None:
        """The unit whose backward comes next, after the newest forward."""
        position = self._positions.get(unit, 0)
        return self._known[0][position - 1] if position > 0 else None

    @property
    def last(self) -> T | None:
        """The unit that computed last in the newest forward."""
        return self._known[0][-1] if self._known[0] else None


def _positions(order: tuple[T, ...]) -> dict[T, int]:
    """Where each unit ran first."""
    return {unit: i for i, unit in reversed(tuple(enumerate(order)))}


class ActionKind(StrEnum):
    """What is done for a unit."""

    GATHER = "gather"
    """Launch its all-gather."""
    WAIT = "wait"
    """Wait for it, and lay the parameters out."""
    FORWARD = "forward"
    """Compute."""
    BACKWARD = "backward"
    """Compute."""
    FREE = "free"
    """Take its full parameters' memory away."""
    REDUCE = "reduce"
    """Copy its gradients together, and launch their reduction."""
    FINISH = "finish"
    """Wait for the reduction, and give its memory back."""


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a schedule."""

    kind: ActionKind
    unit: str


def derive(
    order: Sequence[str],
    *,
    roots: AbstractSet[str],
    kept: AbstractSet[str],
    frozen: AbstractSet[str] = frozenset(),
    max_reductions: int = 1,
) -> tuple[Action, ...]:
    """What a step does if forward takes this order, one unit's gather ahead.

    `roots` are around all others: their forward ends last and their backward begins first. `kept`
    are held from forward to backward; `frozen` have nothing to reduce. Backward is taken to come to
    every unit.
    """
    return _Derivation(order, roots, kept, frozen, max_reductions).run()


class _Derivation:
    def __init__(
        self,
        order: Sequence[str],
        roots: AbstractSet[str],
        kept: AbstractSet[str],
        frozen: AbstractSet[str],
        max_reductions: int,
    ) -> None:
        self._order, self._roots, self._kept, self._frozen = order, roots, kept, frozen
        self._max_reductions = max_reductions
        self._actions: list[Action] = []
        self._launched: set[str] = set()
        self._full: set[str] = set()
        self._reducing: list[str] = []

    def run(self) -> tuple[Action, ...]:
        order = self._order
        roots = [u for u in dict.fromkeys(order) if u in self._roots]
        for position, unit in enumerate(order):
            self._hold(unit)
            self._launch(order[position + 1 : position + 2])
            self._do(ActionKind.FORWARD, unit)
            if unit not in self._kept and unit not in roots:
                self._free(unit)
        for unit in roots:
            if unit not in self._kept:
                self._free(unit)
        backward = [u for u in reversed(order) if u not in roots]
        for unit in roots:
            self._hold(unit)
            self._launch(backward[:1])
            self._do(ActionKind.BACKWARD, unit)
        if not roots:
            self._launch(backward[:1])
        for position, unit in enumerate(backward):
            self._hold(unit)
            self._launch(backward[position + 1 : position + 2])
            self._do(ActionKind.BACKWARD, unit)
            # Gradients of a unit that ran several times come with the last of its backwards.
            self._end(unit, reduces=unit not in backward[position + 1 :])
        for unit in roots:
            self._end(unit, reduces=True)
        while self._reducing:
            self._do(ActionKind.FINISH, self._reducing.pop(0))
        return tuple(self._actions)

    def _do(self, kind: ActionKind, unit: str) -> None:
        self._actions.append(Action(kind, unit))

    def _launch(self, units: Sequence[str]) -> None:
        for unit in units:
            if unit not in self._full and unit not in self._launched:
                self._launched.add(unit)
                self._do(ActionKind.GATHER, unit)

    def _hold(self, unit: str) -> None:
        self._launch([unit])
        if unit in self._launched:
            self._launched.discard(unit)
            self._full.add(unit)
            self._do(ActionKind.WAIT, unit)

    def _free(self, unit: str) -> None:
        self._full.discard(unit)
        self._do(ActionKind.FREE, unit)

    def _end(self, unit: str, *, reduces: bool) -> None:
        self._free(unit)
        if unit in self._frozen or not reduces:
            return
        while len(self._reducing) >= self._max_reductions:
            self._do(ActionKind.FINISH, self._reducing.pop(0))
        self._do(ActionKind.REDUCE, unit)
        self._reducing.append(unit)
