"""The compilation that runs now, and those that ran: stages time themselves and tell here."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from shoal.compile import environment
from shoal.compile.aot.lowered import Lowered
from shoal.compile.node_kinds import communicates, is_wait
from shoal.compile.observe import logs
from shoal.compile.observe.logs import Topic, topics_of
from shoal.compile.observe.record import CacheUse, CompileRecord
from shoal.compile.passes.contract import Pipeline, Report

MOST_RECORDS = 1000
"""Older ones are forgotten."""


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """Collects what is told of one compilation."""

    number: int
    topics: frozenset[Topic]
    facts: dict[str, Any] = field(default_factory=dict)
    """Fields of the record."""
    seconds: dict[str, float] = field(default_factory=dict)
    """The time of each stage."""
    passes: dict[str, Report] = field(default_factory=dict)
    """What the passes of each stage did; of a stage that ran again, the last time."""

    def record(self) -> CompileRecord | None:
        """What is known by now; None before the graphs are there."""
        if "num_inputs" not in self.facts:
            return None
        return CompileRecord(
            number=self.number, seconds=self.seconds, passes=self.passes, **self.facts
        )


_current: ContextVar[Observation | None] = ContextVar("shoal_observation", default=None)
_numbers = itertools.count()
_kept: deque[Observation] = deque(maxlen=MOST_RECORDS)


@contextmanager
def observing(topics: str = "") -> Iterator[None]:
    """Observe the compilation that runs inside; topics besides those of the environment."""
    chosen = topics_of(environment.log_topics()) | topics_of(topics)
    facts = {"where": "", "num_nodes_before": 0, "cache": CacheUse.OFF}
    made = Observation(next(_numbers), chosen, facts)
    _kept.append(made)
    with resumed(made):
        yield


@contextmanager
def resumed(observation: Observation | None) -> Iterator[None]:
    """Go on observing for what was left for later."""
    token = _current.set(observation)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Observation | None:
    """The observation of the compilation that runs now."""
    return _current.get()


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Time a stage of the compilation that runs now."""
    start = time.perf_counter()
    try:
        yield
    finally:
        observation = _current.get()
        if observation is not None:
            spent = observation.seconds.get(name, 0.0) + time.perf_counter() - start
            observation.seconds[name] = spent


def say(topic: Topic, text: Callable[[], str]) -> None:
    """Log what `text` gives, which is asked only if somebody wants to know."""
    observation = _current.get()
    if observation is not None and topic in observation.topics:
        logs.write(topic, f"graph {observation.number}: {text()}")


def run_passes(stage: str, passes: Pipeline, module: GraphModule) -> Report:
    """Run the passes of a stage over a graph, and keep what each of them did."""
    report = passes.run(module.graph)
    if report.steps:
        module.recompile()
    tell_passes(stage, report)
    return report


def tell_passes(stage: str, report: Report) -> None:
    """Keep what the passes of a stage did in the compilation that runs now."""
    observation = _current.get()
    if observation is not None and report.steps:
        observation.passes[stage] = report
        say(Topic.GRAPHS, lambda: f"passes, {stage}\n{report}")


def tell(**facts: Any) -> None:
    """Keep fields of the record of the compilation that runs now."""
    observation = _current.get()
    if observation is not None:
        observation.facts.update(facts)


def tell_lowered(lowered: Lowered) -> None:
    """Keep what the graphs of the compilation that runs now are."""
    signature = lowered.signature
    modules = [one for one in (lowered.forward, lowered.backward) if one is not None]
    tell(
        num_inputs=len(signature.inputs),
        num_outputs=len(signature.outputs),
        num_mutated=sum(one.mutation.data or one.mutation.is_set for one in signature.inputs),
        num_bases=len(signature.bases),
        trains=signature.trains,
        num_saved=lowered.num_saved,
        saved_bytes=lowered.saved_bytes,
        num_nodes_forward=count_calls(lowered.forward),
        num_nodes_backward=sum(map(count_calls, modules[1:])),
        num_collectives=sum(
            communicates(node) and not is_wait(node)
            for module in modules
            for node in module.graph.nodes
        ),
    )


def count_calls(module: GraphModule) -> int:
    """The nodes of a graph that do something."""
    return sum(node.op.startswith("call_") for node in module.graph.nodes)


def records() -> list[CompileRecord]:
    """The latest compilations of this process, oldest first."""
    found = (observation.record() for observation in list(_kept))
    return [record for record in found if record is not None]


def forget() -> None:
    """Drop all records."""
    _kept.clear()
