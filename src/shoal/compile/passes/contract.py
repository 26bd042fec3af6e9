"""What a pass needs, and what it leaves behind.

A fact is a promise about a graph, by name. A pass may require facts that passes before it provide,
and may undo facts: new collectives undo the order that an earlier pass made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from torch import fx

from shoal.errors import UsageError


class Fact(StrEnum):
    """The facts of shoal's own passes; any other string is a fact of yours."""

    BUCKETED_ALL_REDUCES = "all-reduces are in buckets"
    BUCKETED_ALL_GATHERS = "all-gathers are in buckets"
    BUCKETED_REDUCE_SCATTERS = "reduce-scatters are in buckets"
    LATE_WAITS = "waits stand right before the first use"
    EARLY_STARTS = "collectives start as soon as they can"
    BOUNDED_BYTES = "the bytes in flight are bounded"
    NOT_IN_ORDER_YET = "no pass has put collectives in order"


ORDER = frozenset({Fact.LATE_WAITS, Fact.EARLY_STARTS, Fact.BOUNDED_BYTES})
"""The facts that hold only as long as nobody adds or moves collectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A function that changes a graph in place, and what it promises."""

    name: str
    run: Callable[[fx.Graph], object]
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()
    undoes: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not self.name:
            raise UsageError("expected a name for the pass, got an empty one")
        if not callable(self.run):
            raise UsageError(f"pass {self.name}: expected a function of a graph, got {self.run!r}")
        for kind in ("requires", "provides", "undoes"):
            facts = getattr(self, kind)
            if isinstance(facts, str):
                raise UsageError(f"pass {self.name}: expected a set for {kind}, got {facts!r}")
            object.__setattr__(self, kind, frozenset(facts))
        both = self.provides & self.undoes
        if both:
            raise UsageError(f"pass {self.name} both provides and undoes {_listed(both)}")


def check_passes(passes: Sequence[Pass], given: Iterable[str] = ()) -> frozenset[str]:
    """Raise unless each pass finds what it requires; return the facts that hold in the end."""
    holding = frozenset(given)
    for place, one in enumerate(passes):
        missing = one.requires - holding
        if missing:
            raise UsageError(_explain(one, missing, passes, place))
        holding = holding - one.undoes | one.provides
    return holding


def _explain(one: Pass, missing: frozenset[str], passes: Sequence[Pass], place: int) -> str:
    """What is missing, who could have provided it, and who took it away."""
    earlier = [other.name for other in passes[:place]]
    lost = [other.name for other in passes[:place] if other.undoes & missing]
    later = [other.name for other in passes[place + 1 :] if other.provides & missing]
    if later:
        advice = f"move {', '.join(later)} before it"
    elif lost:
        advice = f"move it before {lost[0]}, or add a pass that provides it"
    else:
        advice = "add a pass that provides it"
    return (
        f"pass {one.name} requires {_listed(missing)}, which does not hold after "
        f"{', '.join(earlier) or 'no pass'}"
        + (f"; undone by {', '.join(lost)}" if lost else "")
        + f"; {advice}"
    )


def _listed(facts: Iterable[str]) -> str:
    return ", ".join(repr(str(fact)) for fact in sorted(facts))
