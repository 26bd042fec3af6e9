"""Which members of a product of parameters an ordinary run takes; a soak takes the others.

A test on ranks tries all its sets of parameters on the smallest world, and a third of the same on
each larger one. A test marked `sampled` takes fewer sets, in which every pair of values occurs.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest

WORLD_SIZE = "world_size"
"""The parameter that a test on ranks has where it names several."""

Point = Sequence[Hashable]
"""One set of parameters: the value of every axis."""


def mark_unsampled(items: Iterable[pytest.Item]) -> None:
    """Leave to the soak what the samples of tests do not need."""
    tests: dict[str, dict[Any, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("unsampled") is None:
            parameters: dict[str, Any] = item.callspec.params  # pyright: ignore
            test = item.nodeid.partition("[")[0]
            tests[test][parameters.get(WORLD_SIZE)].append(item)
    for name, worlds in tests.items():
        main = min(worlds, key=lambda size: (size == 1, size))  # one rank shows little
        left = _left_by_sample(worlds[main], name)
        for size in worlds.keys() - {main}:
            left += _left_by_lot(worlds[size], worlds[main], name)
        for member in left:
            member.add_marker(pytest.mark.soak)


def _left_by_sample(members: Sequence[Any], seed: str) -> list[Any]:
    mark = members[0].get_closest_marker("sampled")
    if mark is None:
        return []
    taken = covering([_point(member) for member in members], *mark.args, seed=seed)
    return [member for position, member in enumerate(members) if position not in taken]


def _left_by_lot(members: Sequence[Any], on_main: Sequence[Any], seed: str) -> list[Any]:
    """Two thirds of what is also tried on the main world."""
    tried = [_point(member) for member in on_main]
    again = [member for member in members if _point(member) in tried]
    return random.Random(seed).sample(again, len(again) - math.ceil(len(again) / 3))


def _point(member: Any) -> Point:
    parameters = member.callspec.params.items()
    return [(axis, id(value)) for axis, value in parameters if axis != WORLD_SIZE]


def covering(points: Sequence[Point], strength: int = 2, *, seed: str) -> set[int]:
    """Positions of few points in which every value of an axis occurs, beside every other's.

    That is `strength` 2: what two parameters do to each other is seen. With 1 every value
    occurs once. The same seed gives the same sample in every run.
    """
    strength = min(strength, len(points[0]))
    found = {at: set(itertools.combinations(point, strength)) for at, point in enumerate(points)}
    order = list(found)
    random.Random(seed).shuffle(order)
    missing = set().union(*found.values())
    taken: set[int] = set()
    while missing:
        best = max(order, key=lambda at: len(found[at] & missing))
        taken.add(best)
        missing -= found[best]
    return taken
