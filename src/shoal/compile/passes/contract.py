"""The contract of a graph pass, and the runner that holds every pass to it.

A fact is a promise about a graph, by name. A pass may require facts that passes before it provide,
and may undo facts: new collectives undo the order that an earlier pass made. A `Pipeline` checks
these when it is made. When it runs, it lints the graph after each pass, counts its inputs and
outputs, and computes again the metadata of the nodes that the pass changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from torch import fx

from shoal.compile.passes.metadata import CheckedGraph
from shoal.compile.passes.traffic import GraphTraffic, count_traffic
from shoal.errors import InvariantError, UsageError


class Fact(StrEnum):
    """The facts of shoal's own passes; any other string is a fact of yours."""

    BUCKETED_ALL_REDUCES = "all-reduces are in buckets"
    BUCKETED_ALL_GATHERS = "all-gathers are in buckets"
    BUCKETED_REDUCE_SCATTERS = "reduce-scatters are in buckets"
    LATE_WAITS = "waits stand right before the first use"
    EARLY_STARTS = "collectives start as soon as they can"
    BOUNDED_BYTES = "the bytes in flight are bounded"
    NOT_IN_ORDER_YET = "no pass has put collectives in order"
    PHASES = "each node says whether it ran in forward or in backward"
    FORWARD_SIZES = "forward takes no size from a gradient"
    NO_ALIASES = "no node reads another name of a tensor"
    CHECKPOINT_TAGS = "the tags of checkpoints are complete"
    OLD_VALUES = "backward reads copies of inputs that are written to before it runs"
    INPUT_COPIES = "inputs are written to by copy_ alone"


ORDER = frozenset({Fact.LATE_WAITS, Fact.EARLY_STARTS, Fact.BOUNDED_BYTES})
"""The facts that hold only as long as nobody adds or moves collectives."""


PROMISES = ("requires", "provides", "undoes")


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
        for kind in PROMISES:
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
    """Name the missing facts, the passes that provide them, and the passes that undo them."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """The work of one pass: counts before and after it, its time and its result."""

    name: str
    before: GraphTraffic
    after: GraphTraffic
    seconds: float
    num_nodes: tuple[int, int] = (0, 0)
    """Before the pass, and after it."""
    result: object = None
    """The value that the function of the pass returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of the passes of a pipeline."""

    steps: tuple[PassResult, ...]

    def result_of(self, name: str) -> object:
        """The value that the function of a pass returned; None if no pass of that name ran."""
        return next((step.result for step in self.steps if step.name == name), None)

    def __str__(self) -> str:
        """A table of counts, before and after each pass."""
        rows = [("pass", "nodes", "collectives", "MB", "waits", "max MB in flight", "ms")]
        for step in self.steps:
            old, new = step.before, step.after
            rows.append(
                (
                    step.name,
                    _change(*step.num_nodes),
                    _change(old.num_collectives, new.num_collectives),
                    _change(_mb(old.num_bytes), _mb(new.num_bytes)),
                    _change(old.num_waits, new.num_waits),
                    _change(_mb(old.max_in_flight_bytes), _mb(new.max_in_flight_bytes)),
                    f"{step.seconds * 1000:.1f}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
        return "\n".join(line.rstrip() for line in lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Passes that run one after the other; editing makes another pipeline, checked again."""

    passes: tuple[Pass, ...]
    given: frozenset[str] = frozenset()
    """The facts that hold for graphs before the first pass."""
    verify: bool = True
    """Whether metadata of what a pass changed is computed again and compared; lint always runs."""
    counts: bool = True
    """Whether communication is counted before and after each pass."""

    def __post_init__(self) -> None:
        names = [one.name for one in self.passes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UsageError(f"expected names that differ, got {', '.join(twice)} more than once")
        check_passes(self.passes, self.given)

    @property
    def provides(self) -> frozenset[str]:
        """The facts that hold for graphs after the last pass."""
        return check_passes(self.passes, self.given)

    def run(self, graph: fx.Graph) -> Report:
        """Change a graph in place; say what became of its communication."""
        checked = CheckedGraph(graph) if self.verify else None
        ends = _ends(graph)
        steps = []
        before, num_before = self._traffic(graph), len(graph.nodes)
        for one in self.passes:
            start = time.perf_counter()
            result = one.run(graph)
            seconds = time.perf_counter() - start
            _check_left(one, graph, ends, checked)
            after, num_after = self._traffic(graph), len(graph.nodes)
            done = PassResult(
                name=one.name,
                before=before,
                after=after,
                seconds=seconds,
                num_nodes=(num_before, num_after),
                result=result,
            )
            steps.append(done)
            before, num_before = after, num_after
        return Report(steps=tuple(steps))

    def before(self, name: str, *new: Pass) -> Pipeline:
        """The same with passes put before the one of a name."""
        return self._spliced(name, lambda one: (*new, one))

    def after(self, name: str, *new: Pass) -> Pipeline:
        """The same with passes put after the one of a name."""
        return self._spliced(name, lambda one: (one, *new))

    def without(self, name: str) -> Pipeline:
        """The same without the pass of a name."""
        return self._spliced(name, lambda _: ())

    def replacing(self, name: str, new: Pass) -> Pipeline:
        """The same with another pass in the place of the one of a name."""
        return self._spliced(name, lambda _: (new,))

    def __str__(self) -> str:
        """The passes, with what each requires, provides and undoes."""
        return "\n".join(
            f"{number}. {one.name}"
            + "".join(
                f"\n   {word}: {'; '.join(sorted(getattr(one, word)))}"
                for word in PROMISES
                if getattr(one, word)
            )
            for number, one in enumerate(self.passes, start=1)
        )

    def _traffic(self, graph: fx.Graph) -> GraphTraffic:
        return count_traffic(graph) if self.counts else GraphTraffic()

    def _spliced(self, name: str, instead: Callable[[Pass], tuple[Pass, ...]]) -> Pipeline:
        names = [one.name for one in self.passes]
        if name not in names:
            raise UsageError(f"expected one of the passes {', '.join(names)}, got {name!r}")
        place = names.index(name)
        before, found, after = self.passes[:place], self.passes[place], self.passes[place + 1 :]
        return replace(self, passes=(*before, *instead(found), *after))


def _ends(graph: fx.Graph) -> tuple[int, int]:
    """The numbers of a graph's inputs and outputs, which its callers count on."""
    (output,) = graph.find_nodes(op="output")
    returned = output.args[0]
    num_outputs = len(returned) if isinstance(returned, (list, tuple)) else 1
    return len(graph.find_nodes(op="placeholder")), num_outputs


def _check_left(
    one: Pass, graph: fx.Graph, ends: tuple[int, int], checked: CheckedGraph | None
) -> None:
    """Raise, with the name of the pass, if it left a graph that is not whole."""
    try:
        graph.lint()
        if checked is not None:
            checked.check()
    except RuntimeError as error:
        raise InvariantError(f"pass {one.name} broke the graph: {error}") from error
    if _ends(graph) != ends:
        raise InvariantError(
            f"pass {one.name} broke the graph: expected the {ends[0]} inputs and {ends[1]} outputs "
            f"that it had, got {' and '.join(map(str, _ends(graph)))}"
        )


def _change(before: object, after: object) -> str:
    return str(before) if before == after else f"{before} → {after}"


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1024**2:.2f}"
