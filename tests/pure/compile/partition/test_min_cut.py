"""The cut is the cheapest there is: compared with trying every choice."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compile.partition.min_cut import CutNode, cheapest_kept
from shoal.errors import InvariantError


def available(nodes: list[CutNode], kept: set[int]) -> bool:
    """Whether backward gets everything it needs when these are kept."""
    there: list[bool] = []
    for place, node in enumerate(nodes):
        computable = not node.only_forward and all(there[read] for read in node.reads)
        if node.only_backward and not computable:
            return False
        there.append(place in kept or computable)
        if node.needed and not there[-1]:
            return False
    return True


def cheapest_by_trying(nodes: list[CutNode]) -> int | None:
    costs = [
        sum(nodes[place].cost or 0 for place in kept)
        for size in range(len(nodes) + 1)
        for kept in itertools.combinations(
            [i for i, n in enumerate(nodes) if n.cost is not None and not n.only_backward], size
        )
        if available(nodes, set(kept))
    ]
    return min(costs, default=None)


@st.composite
def problems(draw: st.DrawFn) -> list[CutNode]:
    nodes: list[CutNode] = []
    for place in range(draw(st.integers(1, 8))):
        reads = tuple(sorted(draw(st.sets(st.integers(0, place - 1), max_size=3)))) if place else ()
        after_backward = any(nodes[read].only_backward for read in reads)
        backward = after_backward or draw(st.integers(0, 3)) == 0
        nodes.append(
            CutNode(
                name=f"n{place}",
                cost=draw(st.one_of(st.none(), st.integers(0, 9))),
                reads=reads,
                only_forward=not backward and (not reads or draw(st.booleans())),
                only_backward=backward,
                needed=draw(st.integers(0, 4)) == 0,
            )
        )
    return nodes


@settings(max_examples=300, deadline=None)
@given(problems())
def test_no_choice_is_cheaper(nodes):
    best = cheapest_by_trying(nodes)
    if best is None:
        with pytest.raises(InvariantError, match="can be kept"):
            cheapest_kept(nodes)
        return
    kept = cheapest_kept(nodes)
    assert available(nodes, set(kept))
    assert sum(nodes[place].cost for place in kept) == best
    assert kept == sorted(kept)


def test_of_equal_cuts_the_nearest_to_backward():
    chain = [
        CutNode(name="input", cost=5, only_forward=True),
        CutNode(name="middle", cost=5, reads=(0,)),
        CutNode(name="last", cost=5, reads=(1,)),
        CutNode(name="gradient", cost=None, reads=(2,), only_backward=True),
    ]
    assert cheapest_kept(chain) == [2]


def test_nothing_is_kept_for_nobody():
    assert cheapest_kept([CutNode(name="input", cost=5, only_forward=True)]) == []


def test_the_conflict_is_named():
    nodes = [
        CutNode(name="draw", cost=None, only_forward=True),
        CutNode(name="pair", cost=None, reads=(0,)),
        CutNode(name="gradient", cost=None, reads=(1,), only_backward=True),
    ]
    with pytest.raises(InvariantError, match="draw -> pair"):
        cheapest_kept(nodes)


@pytest.mark.parametrize(
    "wrong", [{"cost": -1}, {"cost": 1, "only_forward": True, "only_backward": True}]
)
def test_wrong_nodes_cannot_be_made(wrong):
    with pytest.raises(ValueError, match="n0"):
        CutNode(name="n0", **wrong)
