"""Passes in a row: checked before they run, and counted when they do."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import fx

from shoal.compile.passes.contract import Pass, check_passes
from shoal.compile.passes.metadata import CheckedGraph
from shoal.compile.passes.traffic import Traffic, count_traffic
from shoal.errors import InvariantError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one pass did."""

    name: str
    before: Traffic
    after: Traffic
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the passes of a pipeline did."""

    steps: tuple[Step, ...]

    def __str__(self) -> str:
        """A table of counts, before and after each pass."""
        head = ("pass", "collectives", "MB", "waits", "max MB in flight", "ms")
        rows = [head] + [
            (
                step.name,
                _change(step.before.num_collectives, step.after.num_collectives),
                _change(_mb(step.before.num_bytes), _mb(step.after.num_bytes)),
                _change(step.before.num_waits, step.after.num_waits),
                _change(_mb(step.before.max_in_flight_bytes), _mb(step.after.max_in_flight_bytes)),
                f"{step.seconds * 1000:.1f}",
            )
            for step in self.steps
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        )
        return "\n".join(line.rstrip() for line in lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Passes that run one after the other; editing makes another pipeline, checked again."""

    passes: tuple[Pass, ...]
    given: frozenset[str] = frozenset()
    """What holds for the graphs that come in."""
    verify: bool = True
    """Whether metadata of what a pass changed is computed again and compared; lint always runs."""

    def __post_init__(self) -> None:
        names = [one.name for one in self.passes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UsageError(f"expected names that differ, got {', '.join(twice)} more than once")
        check_passes(self.passes, self.given)

    @property
    def provides(self) -> frozenset[str]:
        """What holds for the graphs that come out."""
        return check_passes(self.passes, self.given)

    def run(self, graph: fx.Graph) -> Report:
        """Change a graph in place; say what became of its communication."""
        checked = CheckedGraph(graph) if self.verify else None
        ends = _ends(graph)
        steps = []
        before = count_traffic(graph)
        for one in self.passes:
            start = time.perf_counter()
            one.run(graph)
            seconds = time.perf_counter() - start
            _check_left(one, graph, ends, checked)
            after = count_traffic(graph)
            steps.append(Step(name=one.name, before=before, after=after, seconds=seconds))
            before = after
        return Report(steps=tuple(steps))

    def before(self, name: str, *new: Pass) -> Pipeline:
        """The same with passes put before the one of a name."""
        place = self._place(name)
        return self._with((*self.passes[:place], *new, *self.passes[place:]))

    def after(self, name: str, *new: Pass) -> Pipeline:
        """The same with passes put after the one of a name."""
        place = self._place(name) + 1
        return self._with((*self.passes[:place], *new, *self.passes[place:]))

    def without(self, name: str) -> Pipeline:
        """The same without the pass of a name."""
        place = self._place(name)
        return self._with((*self.passes[:place], *self.passes[place + 1 :]))

    def replacing(self, name: str, new: Pass) -> Pipeline:
        """The same with another pass in the place of the one of a name."""
        place = self._place(name)
        return self._with((*self.passes[:place], new, *self.passes[place + 1 :]))

    def __str__(self) -> str:
        """The passes, with what each requires, provides and undoes."""
        return "\n".join(
            f"{number}. {one.name}"
            + "".join(
                f"\n   {word}: {'; '.join(sorted(facts))}"
                for word, facts in (
                    *(("requires", one.requires), ("provides", one.provides)),
                    ("undoes", one.undoes),
                )
                if facts
            )
            for number, one in enumerate(self.passes, start=1)
        )

    def _place(self, name: str) -> int:
        names = [one.name for one in self.passes]
        if name not in names:
            raise UsageError(f"expected one of the passes {', '.join(names)}, got {name!r}")
        return names.index(name)

    def _with(self, passes: Iterable[Pass]) -> Pipeline:
        return replace(self, passes=tuple(passes))


def _ends(graph: fx.Graph) -> tuple[int, int]:
    """How many inputs and outputs a graph has, which whoever calls it counts on."""
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
